"""All settings of a training run, as one typed value."""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro

from fmlab.parallel import Layout, values
from fmlab.train.precision.numbers import numbers_called

_OPTIMIZERS = ("adamw", "lamb", "scaled-adamw")
_PADDED = ("classes", "text-to-text")  # objectives whose rows have lengths of their own
_SHARES = {"lamb": 0.02, "scaled-adamw": 0.01}  # learning rates that are shares of the weights
_POLICIES = ("skip", "stop", "rollback")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. The defaults train a small GPT on Python's manual in a minute or two."""

    model: tyro.conf.Positional[str] = "gpt2-tiny"
    """Preset of the model: gpt2-tiny, llama-tiny, bert-tiny, roberta-tiny, t5-tiny, gpt2, …"""
    corpus: str = "python-docs"
    """What to read: a name from `fmlab data list`, a text file or folder, or hub:owner/set."""
    init: str | None = None
    """Folder of a trained model to start from (out/model of another run), with its tokenizer: for a second
    phase with longer rows, or for fine-tuning. The optimizer starts anew."""
    teacher: str | None = None
    """Folder of a trained model of BERT's kind whose answers are learnt, too; without init, every k-th of its
    layers is where the student starts."""
    tokenizer: str | None = None
    """Folder or file of a tokenizer; without it, one as large as the model's vocabulary is trained."""
    objective: str | None = None
    """What to train for: causal, prefix, experts, masked, next-sentence, sentence-order, classes, span or
    text-to-text; by default what the model's family was made with."""
    steps: int = 300
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences a step, over all ranks and micro-batches."""
    seq_len: int = 128
    """Tokens a sequence."""
    pack_documents: bool = False
    """Keep attention inside documents and predict nothing across their borders."""
    mask_versions: int = 0
    """Objective masked: 0 for new masks each epoch (RoBERTa), n for n in turn (BERT: 10), 1 for static."""
    optimizer: Literal["adamw", "lamb", "scaled-adamw"] = "adamw"
    """adamw; lamb for very large batches: each matrix moves by a share of its own norm; or scaled-adamw, for
    T5: each tensor moves in proportion to its own size."""
    lr: float | None = None
    """Highest learning rate; by default 0.75 / width of the model, 0.2 / width for BERT's family, 0.02
    with lamb and 0.01 with scaled-adamw."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step, as a part of the highest."""
    warmup: int | None = None
    """Steps over which the learning rate rises; by default a tenth of all, at most 100."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases are not decayed."""
    beta1: float = 0.9
    """Memory of the mean gradient."""
    beta2: float = 0.95
    """Memory of the mean squared gradient; BERT's and LAMB's papers have 0.999."""
    clip: float = 1.0
    """Highest norm of the whole gradient; 0 for no clipping."""
    layout: tyro.conf.OmitArgPrefixes[Layout] = field(default_factory=Layout)
    """How a step is spread. One that names no data degree is data parallel over the ranks there are."""
    engine: str = "fmlab"
    """Who runs the layout: fmlab (by hand) or a production engine."""
    backend: str = "auto"
    """Device: auto, cpu, cuda, …"""
    numbers: str | None = None
    """Train in few bits, on one device: bf16-kahan, fp16-scaled, fp8-delayed, … (docs/precision.md)."""
    seed: int = 0
    """Of weights, data order and dropout."""
    validation: float = 0.05
    """Part of the corpus kept for validation."""
    eval_every: int = 100
    """Steps between measurements of the validation loss; it is also measured at the end. 0 for never."""
    eval_batches: int = 8
    """Batches a measurement takes."""
    out: str | None = None
    """Folder for checkpoints, logs and the trained model; nothing is written without it."""
    save_every: int = 0
    """Steps between checkpoints; one is also written at the end. 0 for only then."""
    keep: int = 2
    """Checkpoints to keep; older ones are deleted."""
    keep_every: int = 0
    """Checkpoints of steps divisible by this are kept for good; 0 for none."""
    async_save: bool = False
    """Write checkpoints beside the next steps; takes memory for a copy of weights and optimizer state."""
    resume: bool = False
    """Go on from the last checkpoint in the folder `out`."""
    on_bad_step: Literal["skip", "stop", "rollback"] = "skip"
    """A loss or gradient that is not finite, or a spike: skip makes no update and goes on, stop ends the run
    and says where it began, rollback goes back to the last checkpoint and leaves the batch out."""
    spike_factor: float = 0.0
    """A loss this many robust standard deviations above the median of the last ones is a bad step, too; 0
    for never. 6 leaves ordinary noise alone."""
    max_bad_steps: int = 10
    """Bad steps in a row (skip), or times the run goes back (rollback); one more ends it."""
    leave_out: int = 1
    """Rollback: batches left out, the bad one and those before it, as far as the checkpoint. PaLM: 200 to
    500."""
    compare_replicas: int = 0
    """Steps between comparisons, bit for bit, of what ranks hold alike (and before each checkpoint); a
    difference, as a failing chip makes, ends the run and names tensor and ranks. 0 for never."""
    collective_timeout: float = 600.0
    """Seconds within which a collective must end under torchrun; else the ranks end, and say who did not
    come, in which call, at which line. 0 for no limit."""
    check_collectives: bool = False
    """Compare every collective between ranks before it runs: slow, to find where they first differ."""
    stragglers: float = 0.25
    """A rank that keeps the others waiting for more than this share of the time is named; 0 for never."""
    log_every: int = 20
    """Steps between lines of output where there is no progress bar; 0 for no output at all."""
    tensorboard: bool = False
    """Write TensorBoard files into `out`."""

    def __post_init__(self) -> None:
        """Raises ValueError that says what is legal, for values that cannot work whatever the data."""
        for name in (each.name for each in dataclasses.fields(TrainConfig)):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        for name in ("steps", "batch_size", "seq_len", "eval_batches", "keep", "leave_out"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in (
            "eval_every",
            "save_every",
            "keep_every",
            "log_every",
            "clip",
            "weight_decay",
            "mask_versions",
            "max_bad_steps",
            "compare_replicas",
            "collective_timeout",
        ):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1", getattr(self, name))
        _require(self.lr is None or 0 < self.lr < math.inf, "lr", "above 0 and finite", self.lr)
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "between 0 and 1", self.min_lr_ratio)
        _require(0 <= self.warmup_steps < self.steps, "warmup", f"0 to {self.steps - 1}", self.warmup)
        _require(0 < self.validation < 1, "validation", "above 0 and below 1", self.validation)
        _require(0 <= self.seed < 2**63, "seed", "0 or more, and below 2**63", self.seed)
        _require(self.optimizer in _OPTIMIZERS, "optimizer", " or ".join(_OPTIMIZERS), repr(self.optimizer))
        _require(0 <= self.stragglers < 1, "stragglers", "at least 0 and below 1", self.stragglers)
        if self.compare_replicas and self.engine == "deepspeed":
            raise ValueError(
                "compare_replicas reads what each rank holds from the engine's ledger, and DeepSpeed keeps "
                "its own: leave it out, or choose engine='fmlab' or 'torch'"
            )
        if self.numbers is not None:
            self._check_numbers(self.numbers)
        self._check_bad_steps()
        for name in ("save_every", "keep_every", "async_save", "resume", "tensorboard"):
            if getattr(self, name) and self.out is None:
                raise ValueError(f"{name} needs a folder: set out as well")

    def _check_bad_steps(self) -> None:
        """Raise ValueError for a policy that cannot be followed, and for settings that would do nothing."""
        policy, factor = self.on_bad_step, self.spike_factor
        _require(policy in _POLICIES, "on_bad_step", ", ".join(_POLICIES), repr(policy))
        _require(0 <= factor < math.inf, "spike_factor", "at least 0 and finite", factor)
        if policy == "rollback" and (self.out is None or not self.save_every):
            raise ValueError("on_bad_step='rollback' needs checkpoints to go back to: set out and save_every")
        if policy != "rollback" and self.leave_out != 1:
            raise ValueError(f"leave_out is of on_bad_step='rollback', and that is {policy!r}: leave it out")
        if self.engine == "deepspeed" and policy == "skip" and factor:
            raise ValueError(
                "engine='deepspeed' cannot skip the update of a spike, whose loss is known after it; choose "
                "on_bad_step='rollback' or 'stop', or leave spike_factor out"
            )

    def _check_numbers(self, name: str) -> None:
        """Raise ValueError for numbers that are unknown, or that something else contradicts."""
        numbers_called(name)
        if self.optimizer != "adamw":
            raise ValueError(
                f"numbers={name!r} writes AdamW's updates back in few bits, and optimizer is "
                f"{self.optimizer!r}: leave one of them out"
            )
        if self.layout.precision != "fp32":
            raise ValueError(
                f"numbers={name!r} says what products run in, and precision={self.layout.precision!r} too: "
                "leave one of them out"
            )
        if self.backend not in ("auto", "cpu", "cuda"):  # refused again where "auto" finds something else
            raise ValueError(
                f"numbers={name!r} runs on the backends cpu and cuda, and this is {self.backend}: leave one "
                "of them out"
            )

    @property
    def warmup_steps(self) -> int:
        """`warmup`, or its default."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    def lr_for(self, hidden_size: int, factor: float = 0.75) -> float:
        """`lr`, or its default for a model of that width: factor / width.

        With 0.75 it is 1.0 to 2.4 times that of Brown et al. (2020), table 2.1, from 6e-4 at a width of 768
        to 6e-5 at 12288, whose batches are far larger. Those of the others are shares of the weights.
        """
        if self.lr is not None:
            return self.lr
        return _SHARES.get(self.optimizer, factor / hidden_size)

    @property
    def items_per_step(self) -> int | None:
        """What a step counts its speed in: tokens, over all ranks and micro-batches. None where rows are
        padded, for padding is no work done: there the step's targets are counted."""
        return None if self.objective in _PADDED else self.batch_size * self.seq_len

    @property
    def item(self) -> str:
        """The name of what is counted."""
        return "tokens" if self.items_per_step else "targets"

    def layout_for(self, world_size: int) -> Layout:
        """The layout for that many ranks. Raises ValueError when it or the batch does not fit them."""
        layout = self.layout
        if layout.data == 1 and world_size % layout.world_size == 0:
            layout = dataclasses.replace(layout, data=world_size // layout.world_size)
        layout.validate(world_size, self.batch_size)
        return layout

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for writing them down."""
        return dataclasses.asdict(self)


_WHOLE = [
    "steps",
    "batch_size",
    "seq_len",
    "warmup",
    "seed",
    "mask_versions",
    "eval_every",
    "eval_batches",
    "save_every",
    "keep",
    "keep_every",
    "max_bad_steps",
    "leave_out",
    "log_every",
    "compare_replicas",
]
_REAL = ["spike_factor", "lr", "min_lr_ratio", "weight_decay", "beta1", "beta2", "clip", "validation"]
_REAL += ["collective_timeout", "stragglers"]
_PATHS = ["corpus", "init", "teacher", "tokenizer", "out"]
_FLAGS = ["pack_documents", "async_save", "resume", "tensorboard", "check_collectives"]
_OPTIONAL = ["lr", "warmup", "init", "teacher", "tokenizer", "objective", "out", "numbers"]


def _plain(name: str, value: Any) -> Any:
    """A setting as a plain value that can be written down: numbers of numpy and paths become Python's.

    Raises ValueError for a value of another kind than the setting's.
    """
    if value is None and name in _OPTIONAL:
        return value
    if name in _WHOLE:
        number = values.index(value)
        legal = "a whole number" + (" below 2**63" if type(value) is int else "")
        _require(number is not None, name, legal, repr(value))
        return number
    if name in _REAL:
        _require(values.real(value) is not None, name, "a number", repr(value))
        return values.real(value)
    if name in _PATHS:
        _require(isinstance(value, str | os.PathLike), name, "a path or a name", repr(value))
        return value if name == "corpus" and isinstance(value, str) else os.path.expanduser(value)
    if name in _FLAGS:
        _require(isinstance(value, bool), name, "True or False", repr(value))
    elif name == "layout":
        _require(isinstance(value, Layout), name, "a fmlab.parallel.Layout", repr(value))
    else:
        _require(isinstance(value, str), name, "a name", repr(value))
    return value


def _require(condition: bool, name: str, legal: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {legal}, got {value}")
