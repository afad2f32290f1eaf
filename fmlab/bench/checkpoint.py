"""What a checkpoint costs, in steps and against torch.distributed.checkpoint, on one process.

Both sides write the same tensors to the same disk and flush them: weights and AdamW's two moments of a model
after a few steps. Ours also hashes every byte and proves the hash when it loads; torch's does neither.
"""

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fmlab.backends import get_backend
from fmlab.bench import Result, interleaved
from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM
from fmlab.parallel import Engine, Layout, parallelize
from fmlab.train.optim import adamw

CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "max_positions": 256,
    "num_layers": 6,
    "hidden_size": 384,
    "num_heads": 6,
}
ROWS, LENGTH = 8, 128


class Bench:
    """A model that is trained, and a folder for both sides."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.engine: Engine = parallelize(
            GPT(GPTConfig(**CONFIG)),
            Layout(),
            CausalLM(),
            adamw(1e-4, (0.9, 0.95), 0.1),
            backend=get_backend("cpu"),
        )
        ids = torch.randint(CONFIG["vocab_size"], (ROWS, LENGTH + 1))
        self.batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        self.step()

    def step(self) -> None:
        self.engine.step([self.batch])

    # --- ours ---

    def save(self) -> None:
        shutil.rmtree(self.folder / "ours", ignore_errors=True)
        self.engine.save(self.folder / "ours")

    def load(self) -> None:
        self.engine.load(self.folder / "ours")

    # --- torch's ---

    def states(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.engine.model, self.engine.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def save_dcp(self) -> None:
        shutil.rmtree(self.folder / "theirs", ignore_errors=True)
        dcp.save(self.states(), storage_writer=dcp.FileSystemWriter(self.folder / "theirs"), no_dist=True)

    def load_dcp(self) -> None:
        states = self.states()
        dcp.load(states, storage_reader=dcp.FileSystemReader(self.folder / "theirs"), no_dist=True)
        set_state_dict(
            self.engine.model,
            self.engine.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    # --- beside the steps: how long the step is held up, and how long until all is written ---

    def begin(self) -> float:
        """Seconds until the next step may begin, ours; then the write is waited for."""
        from fmlab.parallel.checkpoint import take

        start = time.perf_counter()
        taken = take(self.engine, copy=True)
        held = time.perf_counter() - start
        del taken
        return held

    def begin_dcp(self) -> float:
        """The same of torch.distributed.checkpoint's staging to host memory."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        start = time.perf_counter()
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged = stager.stage(self.states())
        held = time.perf_counter() - start
        stager.close()
        del staged
        return held


def run(quick: bool) -> Iterator[Result]:
    """Saving and loading against torch.distributed.checkpoint; the share of a step that a checkpoint
    takes."""
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    pairs = 5 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        size = sum(t.numel() * t.element_size() for t in bench.engine.full_optimizer_state().values())
        size += sum(p.numel() * p.element_size() for p in bench.engine.model.parameters())
        saved = interleaved(bench.save, bench.save_dcp, pairs)
        what = f"{size / 1e6:.0f} MB, flushed to disk; ours with SHA-256"
        yield Result("checkpoint: save", saved.median, "x", ">= 1.0", detail=f"{what}; {saved}")
        loaded = interleaved(bench.load, bench.load_dcp, pairs)
        yield Result("checkpoint: load, verified", loaded.median, "x", ">= 1.0", detail=str(loaded))
        held = [(bench.begin(), bench.begin_dcp()) for _ in range(pairs + 1)][1:]
        ratio = statistics.median(theirs / ours for ours, theirs in held)
        ours, theirs = (statistics.median(side) for side in zip(*held, strict=True))
        detail = f"copies of all tensors: {ours:.3g} s against {theirs:.3g} s"
        yield Result("checkpoint: step held up by one written beside", ratio, "x", ">= 1.0", detail=detail)
        steps = [_seconds(bench.step) for _ in range(pairs)]
        step = statistics.median(steps)
        detail = f"{saved.seconds_a:.3g} s and {ours:.3g} s; a step of {ROWS} x {LENGTH} tokens {step:.3g} s"
        yield Result("checkpoint: in steps, at once", saved.seconds_a / step, "steps", detail=detail)
        yield Result("checkpoint: in steps, beside", ours / step, "steps", detail=detail)


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
