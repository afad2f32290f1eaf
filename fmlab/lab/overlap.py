"""A panel on data parallelism: how much of the all-reduce hides behind the backward pass?"""

from dataclasses import dataclass
from typing import Any

from fmlab.lab.figures import PALETTE, figure
from fmlab.lab.panels import Panel, choices
from fmlab.parallel.ddp.cost import ring_bytes

GRADIENT_BYTES = 4  # fp32
LATENCY = 20e-6  # seconds a message, of the order of a data centre's Ethernet
MODELS = {"124M": 124e6, "1.5B": 1.5e9, "7B": 7e9}


@dataclass(frozen=True)
class Overlap:
    """One backward pass whose gradients leave in equal buckets, as soon as each is complete, over one link.

    parameters: of the model; tokens: of one rank's batch; flops: FLOP/s that a rank reaches; link: bytes/s in
    one direction; latency: seconds a message. The backward pass costs 4 FLOPs a parameter and token. A ring
    all-reduce over n ranks sends 2(n-1)/n of the gradient's bytes (4 a parameter) in 2(n-1) messages.
    """

    parameters: float
    tokens: int
    ranks: int
    buckets: int
    flops: float
    link: float
    latency: float = LATENCY

    @property
    def backward(self) -> float:
        """Seconds."""
        return 4 * self.parameters * self.tokens / self.flops

    @property
    def bucket_seconds(self) -> float:
        """Seconds that one bucket is on the wire."""
        payload = self.parameters * GRADIENT_BYTES / self.buckets
        return ring_bytes("all_reduce", payload, self.ranks) / self.link + 2 * (self.ranks - 1) * self.latency

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Start and end of each bucket in seconds: it waits for its gradients, then for the link."""
        spans: list[tuple[float, float]] = []
        for bucket in range(1, self.buckets + 1):
            ready = self.backward * bucket / self.buckets
            start = max(ready, spans[-1][1] if spans else 0.0)
            spans.append((start, start + self.bucket_seconds))
        return spans

    @property
    def waiting(self) -> float:
        """Seconds between the end of the backward pass and the last gradient's arrival."""
        return self.spans[-1][1] - self.backward

    @property
    def hidden(self) -> float:
        """The part of the communication that the backward pass hides, 0 to 1 (1 when there is none)."""
        whole = self.buckets * self.bucket_seconds
        return 1 - self.waiting / whole if whole else 1.0


def _draw(model: str, ranks: int, tokens: int, buckets: int, link: int, teraflops: int) -> tuple[Any, str]:
    step = Overlap(MODELS[model], tokens, ranks, buckets, teraflops * 1e12, link * 1e9)
    fig, ax = figure(x="time since the backward pass began [ms]", y="what is busy", height=2.1)
    ax.barh("chip: backward", step.backward * 1e3, color=PALETTE[0])
    for start, end in step.spans:
        span = {"left": start * 1e3, "color": PALETTE[1], "edgecolor": "white"}
        ax.barh("link: all-reduce", (end - start) * 1e3, **span)
    ax.axvline(step.backward * 1e3, color="black", linestyle=":", linewidth=1)
    ax.invert_yaxis()
    return fig, (
        f"{model} parameters, {ranks} rank{'s' * (ranks > 1)}, {tokens:,} tokens a rank, "
        f"{buckets} bucket{'s' * (buckets > 1)}, {link} GB/s, "
        f"{teraflops} TFLOP/s: backward {step.backward * 1e3:.1f} ms, on the wire "
        f"{step.buckets * step.bucket_seconds * 1e3:.1f} ms, hidden {step.hidden:.0%}, "
        f"then {step.waiting * 1e3:.1f} ms of waiting"
    )


def overlap_panel() -> Panel:
    """A panel with sliders for model, ranks, tokens, buckets, link and chip; all its figures are modelled.

    Worth finding: one bucket hides nothing, many hide almost all until the link is the slower one or latency
    adds up; and without latency the hidden share does not depend on the size of the model.
    """
    return Panel(
        "How much of the all-reduce hides behind the backward pass?",
        _draw,
        kind="modelled",
        model=choices("124M", list(MODELS), "model [parameters]"),
        ranks=choices(8, (1, 2, 4, 8, 16, 64, 256), "ranks"),
        tokens=choices(8192, (512, 1024, 2048, 4096, 8192, 16384), "batch [tokens a rank]"),
        buckets=choices(8, (1, 2, 4, 8, 16, 64), "buckets"),
        link=choices(25, (1, 3, 12, 25, 50, 200, 450), "link [GB/s, one way]"),
        teraflops=choices(100, (1, 20, 100, 300, 600), "chip [TFLOP/s reached]"),
    )
