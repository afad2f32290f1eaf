"""The faults of chapter 3.5: each has the number that gives it away, and what is put right has none."""

import pytest

from fmlab import Ranks
from fmlab.lab import t5, t5_faults
from fmlab.objectives import Seq2SeqLM
from fmlab.parallel import Layout, parity

#: fault -> (whether the first loss differs, whether the ranks do, factor of the wrong gradients or None)
TOLD = {
    "bias of the first heads": (True, False, None),
    "bias divided, gradient summed": (False, False, None),
    "bias whole, gradient not summed": (False, True, None),
    "no sum behind the encoder": (False, True, None),
    "two sums behind the encoder": (False, False, 2.0),
    "tied table torn apart": (False, False, None),
    "dropout seed of the rank": (True, True, None),
}


@pytest.mark.multirank
def test_each_fault_is_told_by_its_number(ranks2: Ranks) -> None:
    right = dict(precision="fp64", batches=t5.random_batches(1), objective=Seq2SeqLM(), ranks=ranks2)
    assert set(TOLD) == set(t5_faults.FAULTS)
    for name, (loss, ranks, factor) in TOLD.items():
        engine, build = t5_faults.FAULTS[name]
        report = parity(build, Layout(tensor=2), engine, **right)
        told = t5_faults.gives_away(report)
        assert not report.ok, name
        assert told["wrong"], name
        assert (told["loss"] != 1, told["ranks"]) == (loss, ranks), (name, told)
        if factor:
            assert told["factor"] == pytest.approx(factor, abs=0.01), name
    for engine, build in (("fmlab", t5.small_t5), (t5_faults.Summed, t5_faults.whole_table_t5)):
        parity(build, Layout(tensor=2), engine, **right).raise_if_different()
