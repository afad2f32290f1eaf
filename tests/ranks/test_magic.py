"""`%%ranks` in a real kernel, started as Jupyter starts it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks.cluster import Cluster, within

jupyter_client = pytest.importorskip("jupyter_client")
pytestmark = pytest.mark.multirank
REPO = Path(__file__).parents[2]


class Kernel:
    """A kernel and what its cells gave."""

    def __init__(self) -> None:
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(REPO), env={**os.environ, "PYTHONPATH": str(REPO)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.pid)

    def run(self, source: str, allow_error: bool = False, watched: bool = False) -> str:
        """Streams, displays and error lines of a cell, in order, as text."""
        self.outputs: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(
            source, output_hook=self.outputs.append, timeout=40, allow_stdin=watched
        )
        text = "".join(_text(message) for message in self.outputs)
        assert allow_error or reply["content"]["status"] == "ok", text
        return text

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            return content["text"]
        case "display_data" | "execute_result":
            return "+".join(sorted(content["data"])) + "\n"
        case "error":
            return "\n".join(content["traceback"]) + "\n"
    return ""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run("%load_ext fmlab.lab")
    yield kernel
    kernel.close()


def test_a_cell_runs_on_all_ranks_and_equal_outputs_are_shown_once(kernel: Kernel) -> None:
    source = "%%ranks 4\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nprint('sum')\nx"
    assert kernel.run(source) == "[ranks 0-3] sum\n[ranks 0-3] tensor([6., 6.])\n"
    assert kernel.run("%%ranks\nrank") == "".join(f"[rank {r}] {r}\n" for r in range(4))
    assert kernel.run("%%ranks\nx.sum().item();") == ""


def test_functions_classes_and_data_of_the_notebook_follow_their_changes(kernel: Kernel) -> None:
    kernel.run(
        "import math as m\nscale = 10\ndef inner(v): return scale * v + offset\n"
        "class Model:\n    def __call__(self, v): return inner(v) + m.floor(0.5)"
    )
    source = "%%ranks 4 -o got\noffset = 0\nmodel = Model()\nmodel(rank)"
    kernel.run(source)
    assert "[0, 10, 20, 30]" in kernel.run("print(got)")
    kernel.run("scale = 3")
    kernel.run("%%ranks -o got\nmodel(rank)")
    assert "[0, 3, 6, 9]" in kernel.run("print(got)")
    kernel.run("def inner(v): return -v")
    kernel.run("%%ranks -o got\nModel()(rank)")
    assert "[0, -1, -2, -3]" in kernel.run("print(got)")


def test_a_cell_that_uses_an_unsolved_exercise_says_so(kernel: Kernel) -> None:
    kernel.run('def answer():\n    raise NotImplementedError("your code here")')
    said = kernel.run("answer()", allow_error=True)
    assert "your code here" in said
    assert said.endswith("Solve the exercise above, then run this cell again.\n")
    assert "line 1" in kernel.run('raise NotImplementedError("not on CPU")', allow_error=True)


def test_who_assigned_a_name_last_owns_it(kernel: Kernel) -> None:
    kernel.run("lr = 1")
    assert kernel.run("%%ranks 4\nlr") == "[ranks 0-3] 1\n"
    assert kernel.run("%%ranks\nlr = lr + 1\nlr") == "[ranks 0-3] 2\n"
    assert kernel.run("%%ranks\nlr") == "[ranks 0-3] 2\n"
    kernel.run("lr = 5")
    assert kernel.run("%%ranks\nlr") == "[ranks 0-3] 5\n"
    assert "5" in kernel.run("print(lr)")


def test_a_long_cell_is_shown_live_to_who_watches_and_settles_in_order(kernel: Kernel) -> None:
    kernel.run("import fmlab.lab.magic as magic\nmagic.LIVE_AFTER = 0.1")
    source = (
        "%%ranks 4\nimport time\nfor i in range(3):\n    time.sleep(0.1 + 0.05 * (3 - rank))\n    print(i)"
    )
    settled = "[ranks 0-3] 0\n[ranks 0-3] 1\n[ranks 0-3] 2\n"
    assert kernel.run(source) == settled
    kernel.run("%%ranks 2\n1")
    kernel.run(source, watched=True)
    note = "The 2 ranks were replaced by 4: names assigned on them are gone."
    kinds = [message["msg_type"] for message in kernel.outputs]
    at = kinds.index("clear_output")
    live = "".join(_text(message) for message in kernel.outputs[:at])
    assert sorted(live.splitlines()) == sorted(
        [note, *(f"[rank {r}] {i}" for r in range(4) for i in range(3))]
    )
    assert "".join(_text(message) for message in kernel.outputs[at:]) == f"{note}\n{settled}"


def test_pictures_and_rich_results_come_back_labelled(kernel: Kernel) -> None:
    source = "%%ranks 4\nimport matplotlib.pyplot as plt\nplt.plot([rank // 2, 1])\nNone"
    assert kernel.run(source) == "[ranks 0-1]\nimage/png+text/plain\n[ranks 2-3]\nimage/png+text/plain\n"


def test_an_error_is_short_and_names_rank_and_line_of_the_cell(kernel: Kernel) -> None:
    kernel.run("def check(v):\n    assert v < 2, f'{v} is too much'\n    return v")
    text = kernel.run("%%ranks 4\nkept = 1\n\ncheck(rank)", allow_error=True)
    lines = text.splitlines()[2:]  # ranks 0 and 1 show their value
    assert lines[0] == "RankError: rank 2: AssertionError: 2 is too much"
    assert lines[1] == "  at %%ranks cell, line 4, in <module>: check(rank)"
    assert lines[2].startswith("  at notebook cell, line 2, in check: assert v < 2")
    assert "rank 3: raised AssertionError: 3 is too much" in text
    assert len(lines) <= 6
    assert kernel.run("%%ranks\nkept") == "[ranks 0-3] 1\n"


def test_a_dead_rank_and_a_hung_collective_are_reported_and_the_ranks_go_on(kernel: Kernel) -> None:
    text = kernel.run("%%ranks 4\nimport os\nif rank == 2: os._exit(3)\ndist.barrier()", allow_error=True)
    assert "RankError: rank 2: died: its process ended with exit code 3" in text
    text = kernel.run("%%ranks\nif rank != 1:\n    dist.all_reduce(torch.ones(3))", allow_error=True)
    assert "rank 1 returned and did not enter all_reduce" in text
    assert "line 3, in <module>: dist.all_reduce(torch.ones(3))" in text
    text = kernel.run(
        "%%ranks --timeout 1\nimport time\nif rank == 3: time.sleep(9)\ndist.barrier()", allow_error=True
    )
    assert "time limit of 1 s: rank 3 did not enter barrier" in text
    assert "The ranks were restarted" in text
    assert kernel.run("%%ranks\nworld_size") == "[ranks 0-3] 4\n"


def test_interrupt_from_the_notebook(kernel: Kernel) -> None:
    kernel.run("%%ranks 4\nbefore = rank")
    identity = kernel.client.execute("%%ranks\nimport time\nfor _ in range(300): time.sleep(0.1)")
    time.sleep(1.5)
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=10)
    while reply["parent_header"].get("msg_id") != identity:
        reply = kernel.client.get_shell_msg(timeout=10)
    assert reply["content"]["ename"] == "Interrupted"
    assert "KeyboardInterrupt: stopped on the ranks" in "\n".join(reply["content"]["traceback"])
    assert kernel.run("%%ranks\nbefore - rank") == "[ranks 0-3] 0\n"


def test_wrong_use_is_explained(kernel: Kernel) -> None:
    def said(source: str) -> str:
        return kernel.run(source, allow_error=True)

    assert "do not run on the ranks" in said("%%ranks 4\n!ls")
    assert "at least 1" in said("%%ranks 0\n1")
    assert "invalid int value: 'four'" in said("%%ranks four\n1")
    assert "%ranks status" in said("%ranks stop")
    assert "SyntaxError" in said("%%ranks 4\nx = = 1")
    kernel.run("stream = (i for i in range(3))\nimport torch\nbig = torch.zeros(20_000_000)")
    assert "'stream' (generator) cannot be sent" in said("%%ranks 4\nnext(stream)")
    assert "'big' (Tensor) has more than 64 MB" in said("%%ranks 4\nbig.sum()")
    kernel.run("net = torch.nn.Linear(2, 2)\nopt = torch.optim.SGD(net.parameters(), 0.1)\ndel big")
    kernel.run("%%ranks 4\nsum(p.sum() for p in net.parameters())")
    assert "'opt' shares tensors with 'net'" in said("%%ranks 4\nopt.step()")
    kernel.run("%ranks restart")
    kernel.run("%%ranks 4 -o same\nopt.param_groups[0]['params'][0] is net.weight")
    assert "[True, True, True, True]" in kernel.run("print(same)")


def test_commands_and_another_number_of_ranks(kernel: Kernel) -> None:
    kernel.run("%%ranks 4\nmine = 1")
    assert "4 ranks alive" in kernel.run("%ranks status")
    assert "mine" in kernel.run("%ranks status")
    assert kernel.run("%%ranks 2\nworld_size") == (
        "The 4 ranks were replaced by 2: names assigned on them are gone.\n[ranks 0-1] 2\n"
    )
    assert "before they were restarted: run the cell that assigns" in kernel.run(
        "%%ranks\nmine", allow_error=True
    )
    assert "No cell that ran assigns 'yours'" in kernel.run("%%ranks\nyours", allow_error=True)
    kernel.run("from fmlab.lab.magic import notebook_ranks\nsizes = notebook_ranks().run(lambda: 7)")
    assert kernel.run("print(sizes)") == "[7, 7]\n"
    assert kernel.run("%ranks close") == "The 2 ranks were ended.\n"
    assert "No ranks are running" in kernel.run("%ranks status")


def test_cells_run_on_the_hosts_that_joined(kernel: Kernel, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.head.stop()  # the kernel is the head, at the same address
    at, file = cluster.head.address, cluster.head.token_file
    try:
        cluster.join("a", 2)
        assert within(120, lambda: "is ready" in cluster.said("a"))
        said = kernel.run(f"%ranks 2 --cluster {at} --token-file {file}")
        assert "2 ranks alive, time limit 60 s, ranks 0-1 on a" in said
        kernel.run("scale = 10")
        assert kernel.run("%%ranks\nscale * rank") == "[rank 0] 0\n[rank 1] 10\n"
        failed = kernel.run("%%ranks\n1 / rank", allow_error=True)
        assert "rank 0 (host a): ZeroDivisionError" in failed
        assert "%%ranks cell, line 2" in failed
        assert kernel.run("%ranks close") == "The 2 ranks were ended.\n"
        assert within(10, lambda: "the head closed" in cluster.said("a"))
        refused = kernel.run("%ranks 2 --cluster 0.0.0.0:0", allow_error=True)
        assert "lets other machines run code here: give a token_file" in refused
    finally:
        cluster.close()
    assert kernel.run("%%ranks 1\nrank") == "[rank 0] 0\n"  # again on this machine
    kernel.run("%ranks close")


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_nothing_is_left_when_the_kernel_goes(kernel: Kernel, how: str) -> None:
    kernel.run("%load_ext fmlab.lab")
    kernel.run("%%ranks 2\nrank")
    children = kernel.process.children(recursive=True)
    ours = [p for p in children if "fmlab._ranks" in " ".join(p.cmdline())]
    assert len(ours) == 3
    if how == "restart":
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=60)
    else:
        os.kill(kernel.process.pid, signal.SIGKILL)
    until = time.monotonic() + 6
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ours):
        assert time.monotonic() < until
        time.sleep(0.05)
