"""`fmlab plan`: what a training step needs and how long it takes, from the shell."""

from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fmlab.chips import host as find_host
from fmlab.parallel.layout import Layout
from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.cost import Cost, run_cost
from fmlab.planner.emit_options import EmitOptions, write
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.own import OwnModels
from fmlab.planner.plan import Plan, plan
from fmlab.planner.search import Search, search
from fmlab.planner.space import CHOSEN

#: fmlab plan WORD ...: other commands of this room
COMMANDS: dict[str, str] = {
    "validate": "fmlab.planner.report:main",
    "serve": "fmlab.planner.serve_cli:main",
}


@dataclass(frozen=True)
class _Spread(Layout):
    __doc__ = Layout.__doc__  # what its fields mean, for --help

    precision: tyro.conf.Suppress[str] = "fp32"  # the command has its own

    def __post_init__(self) -> None:
        """Checked when it becomes a Layout, so that what is wrong is said in a line."""


@dataclass
class PlanCommand:
    """Plan one training step: memory and time line by line, utilisation, what bounds. Everything is modelled.

    Nothing is built and nothing is computed, so any model and any number of chips will do. Ends with 0 when
    the step fits the chips' memory, with 1 when it does not (then it says what would), with 2 for what cannot
    be. `fmlab plan validate` compares plans with published runs, `fmlab plan serve` plans answering.

    For example: fmlab plan llama3.1-70b --chip h100 --chips 64 --tensor 8 --zero 1 --micro-batches 4
    --global-batch 128 --seq-len 8192 --recompute full

    With --search the layout is looked for: fmlab plan llama3.1-70b --chip h100 --chips 64 --global-batch 128
    --seq-len 8192 --search --why. What is said of the layout (--tensor 8 --zero 1) stays as it is said.
    """

    model: tyro.conf.Positional[str] = "gpt3-175b"
    """A preset: gpt3-175b, llama3.1-70b, bert-large-uncased, t5-11b, mixtral-8x7b, sd-2.1, …"""
    chip: str | None = None
    """Of each rank: a100-80gb, h100, tpu-v5p, trn2, … (`fmlab chips list` names all)."""
    host: str | None = None
    """How chips are wired: p4de.24xlarge, trn2.48xlarge, …; default: a usual one with this chip."""
    chips: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many there are; what the layout leaves of them become data ranks."""
    layout: tyro.conf.OmitArgPrefixes[_Spread] = field(default_factory=_Spread)
    """How the step is divided."""
    global_batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Rows of a step, over all replicas and micro-batches; default: one for each of them."""
    seq_len: str | None = None
    """Tokens of a row; of several streams: input=512,output=114."""
    precision: Literal["bf16", "fp16", "fp8", "fp4", "tf32", "fp32"] = "bf16"
    """Of matrix products."""
    states: Literal["mixed-16", "mixed-18", "fp32-16", "pure-8"] = "mixed-16"
    """How parameters and their states are kept; the number is the bytes of a parameter with Adam."""
    attention: Literal["fused", "unfused"] = "fused"
    """Whether scores are kept and moved (unfused)."""
    dropout: bool = False
    """Whether there is dropout, whose masks are kept."""
    logits: Literal["chunked", "full"] = "chunked"
    """All logits of a micro-batch at once, or a few at a time."""
    activations: Literal["fmlab", "megatron"] = "fmlab"
    """What layers keep: ours, or the published approximation."""
    split_experts: bool = False
    """Tensor ranks divide each expert."""
    flops_convention: str = "full-attention"
    """Of the utilisation: full-attention, causal-halved, 6nd, …"""
    network_bandwidth: Annotated[float | None, tyro.conf.arg(metavar="B/S")] = None
    """Bytes a second of a host, one way, instead of the published figure."""
    host_link: Annotated[float | None, tyro.conf.arg(metavar="B/S")] = None
    """For --offload: bytes a second of a chip's link to its host's memory, one way."""
    host_memory: Annotated[float | None, tyro.conf.arg(metavar="B/S")] = None
    """For --offload: bytes a second of the host's memory that one chip's update gets."""
    calibration: Path | None = None
    """A TOML file with a table [calibration]; default: what was fitted to published runs."""
    tokens: Annotated[float | None, tyro.conf.arg(metavar="N")] = None
    """Of a whole run, such as 300e9: adds its days and, with a price, its dollars."""
    usd_per_chip_hour: Annotated[float | None, tyro.conf.arg(metavar="USD")] = None
    """With --tokens: your price, instead of the first dated one of --host."""
    goodput: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 1.0
    """With --tokens: the share of the time that is training, failures and checkpoints taken off."""
    over_time: bool = False
    """Memory of the fullest stage pass by pass, and what makes its peak."""
    files: tyro.conf.OmitArgPrefixes[EmitOptions] = field(default_factory=EmitOptions)
    """What starts the planned run."""
    search: bool = False
    """Look for the best layouts of --chips instead of planning one. Ends with 1 where none fits."""
    why: bool = False
    """With --search: say why the winner wins."""
    objective: Literal["time", "dollars", "chips"] = "time"
    """With --search: what is to be small."""
    most_tensor: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --search: the highest tensor degree; default: chips that their own links join."""
    keep: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """With --search: how many layouts are shown."""


def main(argv: list[str], own: OwnModels | None = None) -> int:
    """Run `fmlab plan` with these arguments; returns the exit status.

    own: the models of a project of its own, which the arguments name instead of our presets.

    Raises ValueError or OSError for what the user can put right.
    """
    if argv and argv[0] in COMMANDS:
        module, function = COMMANDS[argv[0]].split(":")
        return int(getattr(import_module(module), function)(argv[1:]))
    command = _parsed(argv, own)
    model = command.model if own is None else own.shape(command.model)
    if command.search:
        return _report(command, _search(command, model), own)
    if command.why:
        raise ValueError("--why explains what a search found: give --search too")
    layout = _layout(command)
    made = plan(
        model,
        chips=command.chips,
        layout=layout,
        global_batch=command.global_batch or layout.data * layout.micro_batches,
        **_asked(command),
    )
    run = _run(command, made)
    print(made)
    if command.over_time:
        print(f"\n{made.memory_over_time()}")
    if run is not None:
        print(f"\n{run}")
    if written := write(command.files, made, command.tokens, own):
        print(f"\n{written}")
    return 1 if made.fits is False else 0


def _parsed(argv: list[str], own: OwnModels | None) -> PlanCommand:
    if own is None:
        return tyro.cli(PlanCommand, args=argv, prog="fmlab plan")
    usual = PlanCommand(model=next(iter(own.shapes)))
    return tyro.cli(PlanCommand, args=argv, prog="plan", default=usual)


def _asked(command: PlanCommand) -> dict[str, Any]:
    """What a plan and a search are told alike."""
    return dict(
        chip=command.chip,
        seq_len=lengths(command.seq_len),
        flops_convention=command.flops_convention,
        calibration=_calibration(command),
        host=command.host,
        network_bandwidth=command.network_bandwidth,
        precision=command.precision,
        states=command.states,
        attention=command.attention,
        dropout=command.dropout,
        logits=command.logits,
        activations=command.activations,
        split_experts=command.split_experts,
    )


def _calibration(command: PlanCommand) -> Calibration | None:
    """The file's, or None for what was fitted, with the host's rates that were given."""
    found = None if command.calibration is None else Calibration.read(command.calibration)
    rates = dict(host_link=command.host_link, host_memory=command.host_memory)
    given = {name: rate for name, rate in rates.items() if rate is not None}
    return (found or fitted()).changed(**given) if given else found


def _search(command: PlanCommand, model: str | ModelShape) -> Search:
    """The best layouts in which everything stays that was said of the layout."""
    if command.chips is None or command.global_batch is None:
        raise ValueError("--search needs --chips and --global-batch: how many chips, and rows of a step")
    said = {one.name: getattr(command.layout, one.name) for one in fields(Layout) if one.name in CHOSEN}
    usual = {one.name: one.default for one in fields(Layout)}
    return search(
        model,
        chips=command.chips,
        global_batch=command.global_batch,
        objective=command.objective,
        most_tensor=command.most_tensor,
        usd_per_chip_hour=command.usd_per_chip_hour,
        only={name: value for name, value in said.items() if value != usual[name]},
        keep=command.keep,
        **_asked(command),
    )


def _report(command: PlanCommand, found: Search, own: OwnModels | None) -> int:
    run = _run(command, found.best) if found.plans and command.tokens is not None else None
    print(found)
    if command.why and found.plans:
        print(f"\n{found.why()}")
    if run is not None:
        print(f"\n{run}")
    if found.plans and (written := write(command.files, found.best, command.tokens, own)):
        print(f"\n{written}")
    return 0 if found.plans else 1


def _run(command: PlanCommand, made: Plan) -> Cost | None:
    """The whole run that was asked for. Raises ValueError for settings of a run without tokens."""
    if command.tokens is None:
        if command.usd_per_chip_hour is not None or command.goodput != 1.0:
            raise ValueError("--usd-per-chip-hour and --goodput are of a whole run: give --tokens too")
        return None
    own = command.usd_per_chip_hour is not None
    priced = command.host is not None and not own and bool(find_host(command.host).prices)
    return run_cost(
        made.step_seconds,
        made.tokens_per_step,
        command.tokens,
        made.machine.whole_chips(made.chips),
        host=command.host if priced else None,
        usd_per_chip_hour=command.usd_per_chip_hour,
        goodput=command.goodput,
    )


def _layout(command: PlanCommand) -> Layout:
    """The layout; chips that it leaves become data ranks, unless their number was given."""
    given = {one.name: getattr(command.layout, one.name) for one in fields(Layout)}
    others = given["tensor"] * given["context"] * given["pipeline"]
    if command.chips and given["data"] == 1 and others > 0 and command.chips % others == 0:
        given["data"] = max(1, command.chips // others)
    return Layout(**given)


def lengths(text: str | None) -> int | dict[str, int] | None:
    """ "2048" or "input=512,output=114" as plan takes it. Raises ValueError for anything else."""
    if text is None:
        return None
    try:
        if "=" not in text:
            return int(text)
        pairs = (pair.split("=", 1) for pair in text.split(","))
        return {name.strip(): int(number) for name, number in pairs}
    except ValueError:
        raise ValueError(
            f"--seq-len {text}: give a number, or input=512,output=114 for several streams"
        ) from None
