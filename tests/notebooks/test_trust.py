"""Only a user's own act makes a notebook trusted: nothing of ours signs one, an untrusted one runs nothing in
the browser, and our static views are all there in it."""

import json
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from fmlab.lab import launch
from fmlab.lab.curriculum import notebooks_folder
from fmlab.lab.export import export

sys.path.insert(0, str(Path(__file__).parent))
from lab_page import NOTEBOOK_JS, LabPage
from test_browser import ARTIFACTS, CHROMIUM, FLAGS, _TestServer

NOTEBOOKS = notebooks_folder()
CHAPTER = "2.3"  # pictures, tables, source, predictions
COMMITTED = sorted(NOTEBOOKS.rglob("*.ipynb"))
BAD = {
    "script": "<p>seen-script</p><script>window.ran = 'script'</script>",
    "image": "<p>seen-image</p><img src='x:' onerror=\"window.ran = 'image'\">",
    "link": "<a href=\"javascript:window.ran = 'link'\">seen-link</a>",
    "frame": "<p>seen-frame</p><iframe srcdoc=\"<script>parent.ran = 'frame'</script>\"></iframe>",
    "svg": "<p>seen-svg</p><svg onload=\"window.ran = 'svg'\"></svg>",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has trusted nothing yet."""
    for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))
    for name in ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    return tmp_path / "home"


def is_signed(file: Path) -> bool:
    notary = NotebookNotary(data_dir=launch.os.environ["JUPYTER_DATA_DIR"])
    try:
        return bool(notary.check_signature(nbformat.read(file, as_version=4)))
    finally:
        notary.store.close()


def test_neither_export_nor_the_copies_of_the_lab_are_signed(home: Path, tmp_path: Path) -> None:
    copies = export(tmp_path / "mine", solutions=True, only=[CHAPTER], notebooks=NOTEBOOKS)
    shutil.copytree(NOTEBOOKS, tmp_path / "clone" / "notebooks")
    launch.first_page(tmp_path / "clone")
    assert not home.exists(), "no signature, and no key to sign with"
    Path(launch.os.environ["JUPYTER_DATA_DIR"]).mkdir(parents=True)
    copies += sorted((tmp_path / "clone").rglob(f"{CHAPTER}_*.ipynb"))
    assert len(copies) == 6
    assert not any(is_signed(file) for file in copies)
    notary = NotebookNotary(data_dir=launch.os.environ["JUPYTER_DATA_DIR"])
    notary.sign(nbformat.read(copies[0], as_version=4))
    notary.store.close()
    assert is_signed(copies[0]), "so that a signature would have been seen"


def test_no_committed_notebook_claims_to_be_trusted_or_shows_what_needs_trust() -> None:
    assert len(COMMITTED) > 50
    for file in COMMITTED:
        notebook = json.loads(file.read_text())
        assert "signature" not in notebook["metadata"], file
        for cell in notebook["cells"]:
            assert "trusted" not in cell["metadata"], file
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                assert data.keys() <= {"text/plain", "text/html", "image/png"}, (file, data.keys())
                tags = _tags("".join(data.get("text/html", "")))
                assert not tags & {"script", "iframe", "object", "embed", "form", "button", "svg"}, file


def _tags(page: str) -> set[str]:
    found: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.update({tag})  # type: ignore[method-assign]
    parser.feed(page)
    return found


def _evil(file: Path) -> None:
    """A notebook as somebody else may send it."""
    cells: list[dict[str, Any]] = []
    for name, page in BAD.items():
        shown = {
            "output_type": "display_data",
            "metadata": {},
            "data": {"text/html": page, "text/plain": name},
        }
        cells.append({"cell_type": "code", "id": name, "metadata": {"trusted": True}, "source": name})
        cells[-1] |= {"outputs": [shown], "execution_count": 1}
    script = {"application/javascript": "window.ran = 'javascript'", "text/plain": "javascript"}
    shown = {"output_type": "display_data", "metadata": {}, "data": script}
    cells.append({**cells[-1], "id": "javascript", "outputs": [shown]})
    text = "\n\n".join(page.replace("seen-", "text-") for page in BAD.values())
    cells.append({"cell_type": "markdown", "id": "text", "metadata": {"trusted": True}, "source": text})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    file.write_text(json.dumps(whole))


@pytest.fixture
def page(home: Path, tmp_path: Path) -> Iterator[LabPage]:
    """`fmlab lab` on a folder with somebody's notebook and an exported chapter, in a real browser."""
    root = tmp_path / "root"
    root.mkdir()
    _evil(root / "evil.ipynb")
    export(root / "chapter", only=[CHAPTER], notebooks=NOTEBOOKS)
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(path for name in CHROMIUM if (path := shutil.which(name)))
    port = launch.choose_port("127.0.0.1", None)
    served = _TestServer(root, "127.0.0.1", port, "/lab/tree/evil.ipynb", "a-token-of-this-test")
    process = launch.start(served, browser=False, log=tmp_path / "lab.log")
    try:
        assert launch.wait_until_up(served, process), (tmp_path / "lab.log").read_text()
        with playwright.sync_playwright() as driver:
            context = driver.chromium.launch_persistent_context(
                str(tmp_path / "chromium"), executable_path=browser, args=FLAGS
            )
            found = LabPage(context.new_page(), ARTIFACTS)
            found.open(served.address)
            yield found
            context.close()
    finally:
        launch.stop(process)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.needs_system("chromium")
@pytest.mark.timeout(300)
def test_nothing_runs_in_the_browser_until_the_user_trusts_it(page: LabPage, tmp_path: Path) -> None:
    evil = tmp_path / "root" / "evil.ipynb"
    for name in BAD:
        page.page.locator(".jp-OutputArea").get_by_text(f"seen-{name}").wait_for(timeout=30_000)
    page.page.locator(".jp-MarkdownOutput").wait_for(timeout=30_000)
    page.page.locator(".jp-OutputArea").get_by_text("seen-link").click()
    page.page.wait_for_timeout(1000)
    assert page.page.evaluate("() => window.ran") is None
    assert not is_signed(evil)
    page.page.evaluate("async () => { await window.jupyterapp.commands.execute('docmanager:save'); }")
    page.page.wait_for_timeout(1000)
    assert not is_signed(evil), "looking at it and saving it is no trust"
    _all_of_our_views_are_shown(page, tmp_path / "root" / "chapter")
    _open(page, "evil.ipynb")
    page.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust'); }")
    page.page.locator(".jp-Dialog button.jp-mod-accept").click()
    page.page.wait_for_function("() => window.ran !== undefined", timeout=15_000)


def _open(page: LabPage, path: str) -> None:
    page.page.evaluate(
        f"""async () => {{
            await window.jupyterapp.commands.execute('docmanager:open', {{path: '{path}'}});
            await {NOTEBOOK_JS}.context.ready;
        }}"""
    )


def _all_of_our_views_are_shown(page: LabPage, folder: Path) -> None:
    """An exported chapter as it is opened for the first time, and not run."""
    file = next(folder.rglob("*.ipynb"))
    _open(page, str(file.relative_to(folder.parent)))
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    pictures = 0
    for number, cell in enumerate(cells):
        page.scroll_to(number)
        shown = page.page.locator(".jp-Notebook:visible .jp-CodeCell.jp-mod-active .jp-OutputArea")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                image = shown.locator("img").first
                image.wait_for(timeout=10_000)
                assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
            elif "text/html" in data:
                said, seen = _text("".join(data["text/html"])), "".join(shown.inner_text().split())
                assert said in seen, (number, said, seen)
    assert pictures >= 1


def _text(page: str) -> str:
    """What of a page is read, without white space."""
    said: list[str] = []
    parser = HTMLParser()
    parser.handle_data = said.append  # type: ignore[method-assign]
    parser.feed(page)
    return "".join("".join(said).split())
