"""A panel on planning: what does a step take on these chips, in this layout, and what does the run cost?

Moved by its sliders, `fmlab.planner.plan` works out each combination anew; all figures are modelled. Layouts
that cannot be say why instead.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fmlab.chips import chip as find_chip
from fmlab.chips import host as find_host
from fmlab.lab.figures import PALETTE, figure
from fmlab.lab.panels import Panel, choices
from fmlab.parallel import Layout
from fmlab.planner import Cost, Plan, model_shape, plan, run_cost
from fmlab.planner.time import KINDS, MESSAGES


@dataclass(frozen=True)
class Training:
    """A whole run. rows: of a step; seq_len: tokens of a row in each stream; steps: of the run."""

    model: str
    rows: int
    seq_len: int | Mapping[str, int]
    steps: int


#: Runs by what a slider calls them; batches and tokens as their papers print them.
TRAININGS = {
    # Devlin et al. 2018, appendix A.2: 256 rows, a million steps; here all of them with 512 tokens
    "BERT-large": Training("bert-large-uncased", 256, 512, 1_000_000),
    # Raffel et al. 2020, section 3.7: 2^11 rows, a million steps; 512 tokens in, 114 out
    "T5-3B": Training("t5-3b", 2048, {"input": 512, "output": 114}, 1_000_000),
    # Brown et al. 2020, table 2.1: 2M and 3.2M tokens a step, 300 billion in all
    "GPT-3 6.7B": Training("gpt3-6.7b", 1024, 2048, 143_052),
    "GPT-3 175B": Training("gpt3-175b", 1536, 2048, 95_368),
    # Grattafiori et al. 2024, section 3: 15 trillion tokens, here in steps of 16M
    "Llama 3.1 8B": Training("llama3.1-8b", 2048, 8192, 894_070),
    "Llama 3.1 70B": Training("llama3.1-70b", 2048, 8192, 894_070),
}
CHIPS = ("a100-80gb", "h100", "b200", "tpu-v5p", "tpu-v6e", "trn1-core", "trn2")
#: What data ranks divide.
STATES: dict[str, dict[str, Any]] = {
    "each rank has all": {},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2": {"zero": 2},
    "fully sharded": {"fsdp": True},
}
COLOURS = {
    **dict.fromkeys(("weights", "gradients", "masters", "moments", "compute"), PALETTE[0]),
    **dict.fromkeys(("activations", "logits", "layer computed again", "memory"), PALETTE[1]),
    MESSAGES: PALETTE[2],
    "bubble": PALETTE[3],
}
LEAST = 0.01  # of all lines together: what is less joins "all else"


@dataclass(frozen=True)
class Choice:
    """Where the sliders stand. tensor, pipeline: degrees; data ranks are what is left of the chips.

    rows: of a micro-batch. training, states: see TRAININGS, STATES.
    """

    training: str = "GPT-3 175B"
    on: str = "a100-80gb"
    chips: int = 1024
    tensor: int = 8
    pipeline: int = 16
    states: str = "ZeRO-1"
    rows: int = 1
    recompute: str = "none"
    precision: str = "bf16"

    # region layout
    def plan(self) -> Plan:
        """The plan of a step. ValueError, in plain words, for what cannot be."""
        run, copy = TRAININGS[self.training], self.tensor * self.pipeline
        if self.chips % copy:
            raise ValueError(
                f"tensor {self.tensor} x pipeline {self.pipeline}: one copy of the model takes {copy:,} "
                f"chips, and {self.chips:,} {'is' if self.chips == 1 else 'are'} no multiple of that"
            )
        layers = sum(group.count for group in model_shape(run.model).layers)
        if self.pipeline > layers:
            raise ValueError(
                f"{self.pipeline} stages for the {layers} layers of {self.training}: a stage has at least one"
            )
        data = self.chips // copy
        if run.rows % (data * self.rows):
            raise ValueError(
                f"{data:,} copies of the model with {self.rows} rows at once take {data * self.rows:,} rows, "
                f"and the {run.rows:,} rows of a step are no multiple of that"
            )
        layout = Layout(
            data=data,
            tensor=self.tensor,
            sequence_parallel=self.tensor > 1,
            pipeline=self.pipeline,
            micro_batches=run.rows // (data * self.rows),
            **(STATES[self.states] if data > 1 else {}),
        )
        return plan(
            run.model,
            chip=self.on,
            layout=layout,
            global_batch=run.rows,
            seq_len=run.seq_len,
            recompute=self.recompute,
            precision=self.precision,
        )

    # endregion

    def cost(self, one: Plan) -> Cost:
        """The whole run, without failures; dollars where a dated price of the chip's host is known."""
        host = find_host(str(one.machine.host))
        together = one.tokens_per_step * TRAININGS[self.training].steps
        chips = one.machine.whole_chips(self.chips)
        priced = host.name if host.prices else None
        return run_cost(one.step_seconds, one.tokens_per_step, together, chips, host=priced)


def _draw(**values: Any) -> tuple[Any, str]:
    choice = Choice(**values)
    try:
        one = choice.plan()
    except ValueError as refused:
        return _refusal(str(refused)), f"This cannot be: {refused}"
    fig, (left, right) = figure(
        x=["memory of the fullest chip [GB]", "time of the slowest chip [s]"], y="line", width=8.8, height=3.6
    )
    right.set_ylabel("part")
    memory = {name: line.value / 1e9 for name, line in one.memory.items()}
    _waterfall(left, memory, {name: COLOURS.get(name, "#888888") for name in memory})
    time = {name: line.value for name, line in one.time.items()}
    _waterfall(right, time, {n: COLOURS.get(KINDS.get(n, MESSAGES), "#888888") for n in time})
    if one.capacity is not None:
        left.axvline(one.capacity / 1e9, color="black", linestyle=":", linewidth=1.5)
        left.set_title(f"{one.peak_memory / 1e9:,.1f} of {one.capacity / 1e9:,.1f} GB")
        left.set_xlim(0, 1.05 * max(one.capacity, one.peak_memory) / 1e9)
    right.set_title(f"{one.step_seconds:,.3g} s a step, bound by {one.bound}")
    return fig, _say(choice, one)


def _waterfall(ax: Any, lines: Mapping[str, float], colours: Mapping[str, str]) -> None:
    """A bar for each line, each beginning where the one above ends: the last ends at their sum."""
    total, left = sum(lines.values()), 0.0
    shown = {name: size for name, size in lines.items() if size >= LEAST * total}
    if len(shown) < len(lines):
        shown["all else"] = total - sum(shown.values())
    for name, size in shown.items():
        ax.barh(name, size, left=left, color=colours.get(name, "#888888"), height=0.75)
        left += size
    ax.invert_yaxis()
    ax.tick_params(labelsize=9)


def _refusal(why: str) -> Any:
    fig, ax = figure(x="", y="", width=8.8, height=3.6)
    ax.axis("off")
    words = textwrap.fill(f"This cannot be: {why}.", 70)
    ax.text(0.5, 0.5, words, ha="center", va="center", fontsize=12)
    return fig


# region said
def _say(choice: Choice, one: Plan) -> str:
    layout, cost = one.setup.layout, choice.cost(one)
    unit = "cores" if find_chip(choice.on).unit == "core" else "chips"
    head = (
        f"{choice.training} on {choice.chips:,} {unit} ({choice.on}): data {layout.data:,} x tensor "
        f"{layout.tensor} x pipeline {layout.pipeline}, {layout.micro_batches:,} micro-batches of "
        f"{one.setup.rows}. {_fits(one)} {one.tokens_per_second:,.0f} tokens/s, MFU {one.mfu:.1%}."
    )
    run = f"{cost.steps:,} steps take {cost.days:,.1f} days"
    if cost.usd is None or cost.price is None:
        return f"{head} {run}; no dated price of {one.machine.host} is known"
    return f"{head} {run} and {cost.usd:,.0f} USD ({cost.price.kind}, {cost.price.date})"


def _fits(one: Plan) -> str:
    if one.fits:
        return "It fits."
    worst = max(one.memory.values(), key=lambda line: line.value)
    said = f"It does NOT fit: {one.lacking / 1e9:,.1f} GB too much, most of it {worst.name}."
    found = one.what_would_fit()
    if not found:
        return f"{said} No single change of states or activations helps: take more tensor or pipeline ranks."
    change, other = found[0]
    slower = other.step_seconds / one.step_seconds - 1
    price = f"a step {slower:.1%} longer" if slower > 5e-4 else "no longer a step"
    return f"{said} Cheapest fix: {change}, {price}."


# endregion


def plan_panel() -> Panel:
    """A panel that plans a run: model, chips, layout, micro-batch, recomputation and precision by sliders.

    Worth finding: GPT-3 on 64 A100 fits by no fix but more pipeline or full sharding; a pipeline of 64 stages
    on 1,024 chips waits more than it needs to; an H100's bf16 step is not 3.2 times as fast as an A100's.
    """
    start = Choice()
    return Panel(
        "What if? One step of a run, its days and its dollars",
        _draw,
        kind="modelled",
        training=choices(start.training, list(TRAININGS), "model"),
        on=choices(start.on, CHIPS, "chip"),
        chips=choices(start.chips, [2**n for n in range(15)], "chips"),
        tensor=choices(start.tensor, (1, 2, 4, 8, 16, 32), "tensor ranks"),
        pipeline=choices(start.pipeline, (1, 2, 4, 8, 16, 32, 64), "pipeline stages"),
        states=choices(start.states, list(STATES), "data ranks divide states"),
        rows=choices(start.rows, (1, 2, 4, 8, 16, 32), "rows of a micro-batch"),
        recompute=choices(start.recompute, ("none", "full"), "recomputation"),
        precision=choices(start.precision, ("bf16", "fp8", "fp32"), "precision"),
    )
