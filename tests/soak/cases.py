"""One small run for each engine and kind of layout, and the processes that carry it out.

Ranks are forked from this process, which has imported everything and computed nothing: a start takes a
fraction of a second instead of seconds, so that a hundred kills take minutes.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmlab.models.mixtral import Mixtral, MixtralConfig
from fmlab.parallel import Layout
from fmlab.train import Callback, train
from tests.train.tiny_run import POSITIONS, VOCAB, tiny_config, tiny_corpus, tiny_model, tiny_tokenizer

STEPS = 8


@dataclass(frozen=True)
class Case:
    """A run: its engine, its layout, and other settings. experts: of its model; 0 for a GPT."""

    name: str
    engine: str = "fmlab"
    layout: Mapping[str, Any] | None = None
    dropout: float = 0.1
    experts: int = 0
    settings: Mapping[str, Any] | None = None

    @property
    def ranks(self) -> int:
        return Layout(**(self.layout or {})).world_size

    def model(self) -> Any:
        """The weights of a new start; those of a resumed one come from the checkpoint."""
        torch.manual_seed(0)
        if self.experts:
            return Mixtral(MixtralConfig(VOCAB, POSITIONS, 2, 32, 2, 16, num_experts=self.experts))
        return tiny_model(dropout=self.dropout)

    def config(self, out: Path, **changes: Any) -> Any:
        settings = dict(steps=STEPS, save_every=1, eval_every=4, engine=self.engine, out=str(out))
        layout = Layout(**(self.layout or {}))
        return tiny_config(**(settings | {"layout": layout} | dict(self.settings or {}) | changes))


CASES = [
    Case("one device"),
    Case("one device, fp16", settings={"numbers": "fp16-scaled"}),
    Case("one device, Kahan", settings={"numbers": "bf16-kahan"}),
    Case("one device, fp8", settings={"numbers": "fp8-delayed"}),
    Case("data", layout={"data": 2}),
    Case("ZeRO 1", layout={"data": 2, "zero": 1}),
    Case("ZeRO 2", layout={"data": 2, "zero": 2}),
    Case("ZeRO 3", layout={"data": 2, "zero": 3}),
    Case("FSDP", layout={"data": 2, "fsdp": True}),
    Case("tensor", layout={"tensor": 2}),
    Case("sequence", layout={"tensor": 2, "sequence_parallel": True}),
    Case("pipeline", layout={"pipeline": 2, "micro_batches": 4}),
    Case("context", layout={"context": 2}),
    Case("mixed", layout={"data": 2, "tensor": 2, "zero": 1}),
    Case("experts", layout={"data": 2, "expert": 2}, experts=4),
    Case("torch DDP", "torch", {"data": 4}),
    Case("torch ZeRO 1", "torch", {"data": 2, "zero": 1}),
    Case("torch FSDP2, ZeRO 2", "torch", {"data": 2, "zero": 2}),
    Case("torch FSDP2", "torch", {"data": 2, "fsdp": True}),
    Case("torch tensor", "torch", {"tensor": 2}, dropout=0.0),
    Case("torch pipeline", "torch", {"pipeline": 2, "micro_batches": 4}),
    Case("DeepSpeed ZeRO 1", "deepspeed", {"data": 2, "zero": 1}),
    Case("DeepSpeed ZeRO 2", "deepspeed", {"data": 2, "zero": 2}),
    Case("DeepSpeed ZeRO 3", "deepspeed", {"data": 2, "zero": 3}),
    Case("DeepSpeed pipeline", "deepspeed", {"pipeline": 2, "micro_batches": 4}),
]


class _FirstStep(Callback):
    """Notes where a run began."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_start(self, run: Any) -> None:
        with self.file.open("a") as stream:
            stream.write(f"{run.first_step}\n")


class Ranks:
    """The processes of one start of a case."""

    def __init__(self, case: Case, out: Path, **changes: Any) -> None:
        self.case, self.out = case, out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.starts, self.log = out.parent / f"{out.name}.starts", out.parent / f"{out.name}.log"
        store = out.parent / f"{out.name}.store-{time.monotonic_ns()}"
        self.pids = [self._fork(rank, store, changes) for rank in range(case.ranks)]

    def _fork(self, rank: int, store: Path, changes: Mapping[str, Any]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            with self.log.open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            self._train(rank, store, changes)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _train(self, rank: int, store: Path, changes: Mapping[str, Any]) -> None:
        case = self.case
        if case.ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "MASTER_PORT": 0}
            os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=case.ranks)
        train(
            case.config(self.out, **changes),
            model=case.model(),
            tokenizer=tiny_tokenizer(),
            corpus=tiny_corpus(),
            callbacks=[_FirstStep(self.starts)],
        )

    def wait(self, seconds: float) -> bool | None:
        """Whether all ranks ended well; None if they go on after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.pids:
            for pid in list(self.pids):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.pids.remove(pid)
                    if status:
                        self.kill()
                        return False
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        return True

    def kill(self, first: int = 0, between: float = 0.0) -> None:
        """SIGKILL to one rank; the others follow, as the launcher makes them, so many seconds later."""
        for number, pid in enumerate(self.pids[first:] + self.pids[:first]):
            os.kill(pid, signal.SIGKILL)
            if not number:
                time.sleep(between)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids = []

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""
