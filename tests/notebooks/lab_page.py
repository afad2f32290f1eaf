"""Drives a notebook in a real JupyterLab page, by Lab's own commands and by mouse and keyboard."""

import time
from pathlib import Path
from typing import Any

COMMANDS_JS = "window.jupyterapp.commands.execute"
NOTEBOOK_JS = "window.jupyterapp.shell.currentWidget"


class LabPage:
    """One open notebook. Cells are numbered among the code cells, from 0."""

    def __init__(self, page: Any, artifacts: Path) -> None:
        self.page, self.artifacts = page, artifacts
        self.outside: list[str] = []  # addresses asked for beyond this machine
        self.errors: list[str] = []
        page.on("request", self._on_request)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")):
            self.outside.append(request.url)

    def open(self, address: str) -> None:
        """Open the notebook at `address` and wait until its kernel is ready."""
        self.page.goto(address)
        self.page.wait_for_function("() => window.jupyterapp && window.jupyterapp.started", timeout=90_000)
        self.page.evaluate(
            "async () => { await window.jupyterapp.started; await window.jupyterapp.restored; }"
        )
        self.page.locator(".jp-NotebookPanel:visible").wait_for(timeout=60_000)
        self.page.evaluate(
            f"""async () => {{
                const panel = {NOTEBOOK_JS};
                await panel.context.ready; await panel.sessionContext.ready;
                await panel.sessionContext.session.kernel.info;
            }}"""
        )

    def cells(self) -> list[dict[str, Any]]:
        """Source, tags, marks, execution count and outputs of each code cell."""
        return self.page.evaluate(
            f"""() => {NOTEBOOK_JS}.content.widgets.filter(cell => cell.model.type === 'code').map(cell => ({{
                source: cell.model.sharedModel.source,
                tags: cell.model.getMetadata('tags') || [],
                marks: cell.model.getMetadata('fmlab') || {{}},
                count: cell.model.executionCount,
                outputs: cell.model.outputs.toJSON()
            }}))"""
        )

    def run_all(self, seconds: float) -> list[dict[str, Any]]:
        """Run all cells; wait until each has a count and the kernel is idle."""
        self.page.evaluate(f"() => {{ {COMMANDS_JS}('notebook:run-all-cells'); }}")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            idle = self.page.evaluate(f"() => {NOTEBOOK_JS}.sessionContext.session.kernel.status === 'idle'")
            cells = self.cells()
            if idle and all(cell["count"] for cell in cells):
                return cells
            time.sleep(0.2)
        late = next(cell["source"] for cell in self.cells() if not cell["count"])
        raise TimeoutError(f"after {seconds} s this cell had not run:\n{late}")

    def find(self, key: str, value: str) -> int:
        """The number of the code cell marked `key="value"` in its source."""
        return next(at for at, cell in enumerate(self.cells()) if cell["marks"].get(key) == value)

    def scroll_to(self, number: int) -> None:
        self.page.evaluate(
            f"""number => {{
                const notebook = {NOTEBOOK_JS}.content;
                const code = notebook.widgets.filter(cell => cell.model.type === 'code');
                notebook.activeCellIndex = notebook.widgets.indexOf(code[number]);
                return notebook.scrollToItem(notebook.activeCellIndex, 'start');
            }}""",
            number,
        )

    def type_into(self, number: int, text: str) -> None:
        """Replace the text of a cell by the keyboard, as a learner would."""
        self.scroll_to(number)
        self.page.locator(".jp-Notebook .jp-CodeCell.jp-mod-active .cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(text)

    def run_cell(self, number: int, seconds: float = 60) -> list[dict[str, Any]]:
        """Run one cell with Shift+Enter's command; return its outputs."""
        before = self.cells()[number]["count"] or 0
        self.scroll_to(number)
        self.page.evaluate(f"() => {{ {COMMANDS_JS}('notebook:run-cell'); }}")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            cell = self.cells()[number]
            if (cell["count"] or 0) > before:
                return cell["outputs"]
            time.sleep(0.1)
        raise TimeoutError(f"after {seconds} s this cell had not run:\n{self.cells()[number]['source']}")

    def restart(self) -> None:
        """Restart the kernel, as after a restart counts begin anew."""
        self.page.evaluate(
            f"""async () => {{
                const panel = {NOTEBOOK_JS}, kernel = panel.sessionContext.session.kernel;
                await kernel.restart(); await kernel.info;
                for (const cell of panel.content.widgets) {{
                    if (cell.model.type === 'code') cell.model.clearExecution();
                }}
            }}"""
        )

    def picture(self, name: str) -> None:
        """Keep a screenshot."""
        self.artifacts.mkdir(exist_ok=True)
        self.page.wait_for_timeout(400)  # let the page settle
        self.page.screenshot(path=self.artifacts / f"{name}.png")
