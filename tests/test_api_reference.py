"""The pages of docs/api say what the source says."""

import api_reference
import pytest


def test_the_pages_agree_with_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert api_reference.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_shows_signatures_documentation_and_methods() -> None:
    page = api_reference.page("fmlab.parallel")
    assert "### `parity`" in page
    assert "engine: EngineChoice" in page  # found through two imports
    assert "- `split(batch: Batch, rank: int) -> list[Batch]`" in page
    assert "### `Ranks`" in api_reference.page("fmlab")  # loaded at the first use
