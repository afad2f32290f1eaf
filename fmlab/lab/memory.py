"""A panel on memory: which term of a training step does not fit, and what is the cheapest fix?

All figures are modelled: fp32 weights, gradients and AdamW's moments (16 bytes a parameter), bf16 autocast,
activations by fmlab.parallel.activations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from fmlab.chips import chip
from fmlab.lab.figures import PALETTE, figure
from fmlab.lab.panels import Panel, choices
from fmlab.models import GPTConfig
from fmlab.models.cross_entropy import CHUNK_BYTES
from fmlab.models.presets import GPT_PRESETS
from fmlab.parallel.activations import LayerShape, Run, selective_share, total

#: Bytes of memory; makers print GB and mean GiB.
CHIPS = {
    "A100 40 GB": chip("a100-40gb").memory_bytes,
    "H100 80 GB": chip("h100").memory_bytes,
    "H200 141 GB": chip("h200").memory_bytes,
}
#: Where the states of n chips lie: (name, chips, what is divided: optimizer, gradients, weights).
STATES = {
    "whole on each chip": (1, ()),
    "ZeRO-1 on 8 chips": (8, ("optimizer",)),
    "ZeRO-2 on 8 chips": (8, ("optimizer", "gradients")),
    "ZeRO-3 on 8 chips": (8, ("optimizer", "gradients", "weights")),
    "ZeRO-3 on 64 chips": (64, ("optimizer", "gradients", "weights")),
}
HALF = "half of the layers"


@dataclass(frozen=True)
class Step:
    """One training step of a chip.

    model: a preset of GPT. rows, length: of its micro-batch. attention: "fused" or "tables" (kept, with
    dropout). recompute: "none", "selective", HALF, "full". loss: "whole" logits or "in chunks". states: one
    of STATES; the layer that ZeRO-3 gathers is left out.
    """

    model: str = "gpt2-xl"
    rows: int = 32
    length: int = 1024
    attention: str = "fused"
    recompute: str = "none"
    loss: str = "whole"
    states: str = "whole on each chip"

    @property
    def config(self) -> GPTConfig:
        """The model's shape."""
        return GPTConfig(**GPT_PRESETS[self.model])

    @property
    def parameters(self) -> int:
        """How many, with the output matrix tied."""
        c = self.config
        d = c.hidden_size
        return (c.vocab_size + c.max_positions) * d + c.num_layers * (12 * d * d + 13 * d) + 2 * d

    # region terms
    def terms(self) -> dict[str, float]:
        """Bytes at the end of the forward pass, when most is alive."""
        c, (chips, divided) = self.config, STATES[self.states]
        d = c.hidden_size
        layer = LayerShape(d, c.num_heads, c.num_heads, c.head_size, 4 * d)
        tables = self.attention == "tables"
        run = Run(self.rows, self.length, product=2, dropout=tables, tables=tables)
        logits = 12.0 * self.rows * self.length * c.vocab_size  # logits, log-probabilities, their gradient
        if self.loss == "in chunks":
            logits = min(logits, CHUNK_BYTES)
        each = {"weights": 4, "gradients": 4, "optimizer": 8}
        states = {n: b * self.parameters / (chips if n in divided else 1) for n, b in each.items()}
        return {**states, "activations": self._activations(layer, run), "logits": logits}

    # endregion

    def _activations(self, layer: LayerShape, run: Run) -> float:
        layers = self.config.num_layers
        full = {"full": layers, HALF: layers // 2}.get(self.recompute, 0)
        rest = replace(run, recompute="selective" if self.recompute == "selective" else "none")
        # What is computed again is there once more, one layer at a time.
        again = total(layer, replace(run, recompute="full"), full) + (total(layer, run) if full else 0)
        return total(layer, rest, layers - full) + again

    @property
    def bytes(self) -> float:
        """All terms."""
        return sum(self.terms().values())


@dataclass(frozen=True)
class Fix:
    """A change of a step. time: more operations, as a share of the step's."""

    name: str
    change: dict[str, str]
    time: float


def fixes(step: Step) -> list[Fix]:
    """What could be changed, each by itself."""
    share = selective_share(step.length, step.config.hidden_size) / 3
    found = [
        Fix("the loss in chunks", {"loss": "in chunks"}, 0.0),
        Fix("fused attention", {"attention": "fused"}, 0.0),
        Fix("selective recomputation", {"recompute": "selective"}, share),
        Fix("half of the layers computed again", {"recompute": HALF}, 1 / 6),
        Fix("full recomputation", {"recompute": "full"}, 1 / 3),
    ]
    found += [Fix(name, {"states": name}, 0.0) for name, (chips, _) in STATES.items() if chips > 1]
    if step.attention == "fused":  # frees nothing
        found = [fix for fix in found if fix.change != {"recompute": "selective"}]
    return [fix for fix in found if replace(step, **fix.change) != step]  # type: ignore[arg-type]


# region cheapest
def cheapest(step: Step, room: float) -> tuple[Step, list[Fix]] | None:
    """The step changed so that it fits into `room` bytes, and how; None if nothing helps.

    With as few chips as possible, then as few more operations, then as few changes.
    """

    def ways() -> Iterator[tuple[int, float, int, Step, list[Fix]]]:
        for count in (0, 1, 2, 3):
            for chosen in combinations(fixes(step), count):
                names = [name for fix in chosen for name in fix.change]
                changes: Any = {n: v for fix in chosen for n, v in fix.change.items()}
                changed = replace(step, **changes)
                if len(set(names)) == len(names) and changed.bytes <= room:
                    chips = STATES[changed.states][0]
                    yield chips, sum(fix.time for fix in chosen), count, changed, list(chosen)

    best = min(ways(), key=lambda way: way[:3], default=None)
    return None if best is None else best[3:]


# endregion


def _draw(room: str, **settings: Any) -> tuple[Any, str]:
    step, limit = Step(**settings), CHIPS[room]
    found = cheapest(step, limit)
    fig, ax = figure(x="memory of one chip [GB]", y="step", height=2.1)
    shown = {"as it is": step}
    if found is not None and step.bytes > limit:
        shown["with the fix"] = found[0]
    for place, (name, each) in enumerate(shown.items()):
        left = 0.0
        for colour, (term, size) in zip(PALETTE, each.terms().items(), strict=False):
            label = term if place == 0 else None
            ax.barh(name, size / 1e9, left=left / 1e9, color=colour, edgecolor="white", label=label)
            left += size
    ax.axvline(limit / 1e9, color="black", linestyle=":", linewidth=1)
    ax.invert_yaxis()
    ax.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False, fontsize=8)
    return fig, _say(step, limit, found)


def _say(step: Step, limit: float, found: tuple[Step, list[Fix]] | None) -> str:
    terms = step.terms()
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in terms.items())
    largest = max(terms, key=lambda name: terms[name])
    head = f"{step.model}, {step.rows} x {step.length:,} tokens: {listed}: {step.bytes / 1e9:.0f} GB"
    head += f" of {limit / 1e9:.0f}."
    if step.bytes <= limit:
        return f"{head} It fits."
    if found is None:
        return f"{head} The largest is {largest}; no fix here is enough: fewer rows, or divide the layers."
    names = " and ".join(fix.name for fix in found[1])
    time = sum(fix.time for fix in found[1])
    price = f"{time:.1%} more operations" if time else "no more operations"
    return f"{head} The largest is {largest}. Cheapest fix: {names}, {price}: {found[0].bytes / 1e9:.0f} GB."


def memory_panel() -> Panel:
    """A panel with sliders for model, micro-batch and what may be changed; all its figures are modelled.

    Worth finding: small models die of logits and activations, large ones of states; what is free comes first.
    """
    start = Step()
    return Panel(
        "Which term does not fit, and what is the cheapest fix?",
        _draw,
        kind="modelled",
        model=choices(start.model, list(GPT_PRESETS)[:-1], "model"),
        rows=choices(start.rows, (1, 2, 4, 8, 16, 32, 64), "rows of a micro-batch"),
        length=choices(start.length, (256, 512, 1024, 2048, 4096, 8192), "length [tokens]"),
        attention=choices(start.attention, ("fused", "tables"), "attention"),
        recompute=choices(start.recompute, ("none", "selective", HALF, "full"), "recomputation"),
        loss=choices(start.loss, ("whole", "in chunks"), "logits"),
        states=choices(start.states, list(STATES), "states"),
        room=choices("H100 80 GB", list(CHIPS), "chip"),
    )
