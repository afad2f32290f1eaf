"""A real browser opens the first notebook as a learner does: runs it, moves a slider, solves an exercise."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fmlab.lab import builder, launch, percent
from fmlab.lab.curriculum import load, notebooks_folder

sys.path.insert(0, str(Path(__file__).parent))
from lab_page import LabPage

NOTEBOOKS = notebooks_folder()
NUMBER = "0.1"
ARTIFACTS = Path(__file__).parents[2] / "test-artifacts"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.needs_system("chromium"),
    pytest.mark.timeout(600),
]


class _TestServer(launch.Server):
    """Our own launch settings, and Lab's command interface open to the test."""

    def command(self, browser: bool) -> list[str]:
        return [*super().command(browser), "--expose-app-in-browser"]


@pytest.fixture(scope="module")
def form() -> builder.Form:
    return builder.Form(NOTEBOOKS, load(NOTEBOOKS).find(NUMBER), solved=False)


@pytest.fixture(scope="module")
def server(form: builder.Form, tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.Server]:
    root, home = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")
    copy = root / form.label
    copy.parent.mkdir(parents=True)
    shutil.copy(form.path, copy)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home / name.lower()))
        for name in ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"):
            patch.setenv(name, str(home / name.lower()))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        port = launch.choose_port("127.0.0.1", None)
        served = _TestServer(root, "127.0.0.1", port, f"/lab/tree/{form.label}", "a-token-of-this-test")
        process = launch.start(served, browser=False, log=home / "lab.log")
        try:
            assert launch.wait_until_up(served, process), (home / "lab.log").read_text()
            yield served
        finally:
            launch.stop(process)


@pytest.fixture
def lab(server: launch.Server, tmp_path: Path) -> Iterator[LabPage]:
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(path for name in CHROMIUM if (path := shutil.which(name)))
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(tmp_path), executable_path=browser, args=FLAGS, viewport={"width": 1280, "height": 900}
        )
        page = LabPage(context.new_page(), ARTIFACTS)
        page.open(server.address)
        yield page
        context.close()


def _text(outputs: list[dict[str, Any]]) -> str:
    return "\n".join(str(output.get("data", output)) for output in outputs)


def test_a_learner_runs_moves_and_solves(lab: LabPage, form: builder.Form) -> None:
    lab.picture("welcome-opened")
    cells = lab.run_all(seconds=400)
    for cell in cells:
        errors = [output for output in cell["outputs"] if output["output_type"] == "error"]
        assert not errors or "raises-exception" in cell["tags"], (cell["source"], errors)
    _nothing_is_cut_off(lab)
    _move_a_slider(lab)
    _answer_a_prediction(lab)
    _solve_the_first_exercise(lab, form)
    _restart_and_run_a_late_cell(lab)
    assert lab.outside == []
    assert lab.errors == []


def _nothing_is_cut_off(lab: LabPage) -> None:
    """Long lines of code wrap, and the values behind sliders are shown whole."""
    wide = "nodes => nodes.filter(n => n.scrollWidth > n.clientWidth + 1).map(n => n.innerText.slice(0, 200))"
    assert lab.page.locator(".jp-CodeCell .cm-scroller").evaluate_all(wide) == []
    assert lab.page.locator(".widget-readout").evaluate_all(wide) == []


def _move_a_slider(lab: LabPage) -> None:
    number = next(at for at, cell in enumerate(lab.cells()) if "Panel(" in cell["source"])
    lab.scroll_to(number)
    image = lab.page.locator(".widget-html img[alt]").first
    line = lab.page.locator(".widget-html [role=status][aria-live]").first
    picture, text = image.get_attribute("src"), line.inner_text()
    handle = lab.page.locator(".noUi-handle").first
    handle.focus()
    lab.page.keyboard.press("ArrowRight")
    lab.page.wait_for_function(
        "before => document.querySelector('.widget-html img[alt]').src !== before",
        arg=picture,
        timeout=15_000,
    )
    assert line.inner_text() != text
    assert line.inner_text().split(maxsplit=1)[1] in image.get_attribute("alt")
    lab.picture("welcome-panel-moved")


def _answer_a_prediction(lab: LabPage) -> None:
    number = next(at for at, cell in enumerate(lab.cells()) if "predict(" in cell["source"])
    lab.scroll_to(number)
    table = lab.page.locator(".widget-html table").first
    assert "12,500" not in table.inner_text()
    box = lab.page.locator(".widget-text input").first
    box.fill("12.5k")
    box.press("Enter")
    lab.page.wait_for_function(
        "() => document.querySelector('.widget-html table').innerText.includes('12,500')", timeout=15_000
    )
    lab.picture("welcome-prediction")


def _solve_the_first_exercise(lab: LabPage, form: builder.Form) -> None:
    source = next(cell for cell in percent.read(form.source) if "exercise" in cell.pairs)
    id = source.pairs["exercise"]
    exercise, check = lab.find("exercise", id), lab.find("check", id)
    assert "not solved yet" in _text(lab.cells()[check]["outputs"])
    lab.type_into(exercise, source.text(solved=True).replace(":", "", 1))
    lab.run_cell(exercise)
    assert "Python cannot read your" in _text(lab.run_cell(check))
    lab.type_into(exercise, source.text(solved=True))
    lab.run_cell(exercise)
    outputs = lab.run_cell(check)
    assert f"✓ {id}" in _text(outputs)
    lab.scroll_to(exercise)
    lab.picture("welcome-exercise-solved")


def _restart_and_run_a_late_cell(lab: LabPage) -> None:
    lab.restart()
    late = max(at for at, cell in enumerate(lab.cells()) if cell["source"].startswith("%%ranks"))
    assert "first code cell" in _text(lab.run_cell(late))
