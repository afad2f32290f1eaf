"""Quoted numbers: every one has a source, and what the tutorial says of them can be computed from them."""

import pytest

from fmlab.data.published import model_growth, moores_law


def test_growth_is_in_order_and_sourced() -> None:
    models = model_growth()
    assert [m.month for m in models] == sorted(m.month for m in models)
    assert all(m.source and m.parameters > 1e8 for m in models)
    by_name = {m.name: m for m in models}
    # 334M is the count that the tutorial's abstract prints for BERT-large
    assert by_name["PaLM"].parameters / 334e6 == pytest.approx(1617, abs=0.5)
    assert 3.4 < by_name["PaLM"].years - by_name["BERT-large"].years < 3.6
    assert moores_law(4) == 4
