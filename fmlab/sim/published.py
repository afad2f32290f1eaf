"""Published training steps, and what the simulator says of them.

Step times are quoted; the layout of each is known in full. All ran on Selene: A100 80 GB, eight to a host on
NVSwitch, eight network adapters of 200 Gbit/s a host (Korthikanti et al. 2022, section 6; Narayanan et al.
2021, section 5). Models are GPTs with a vocabulary of 51,200, a sequence of 2,048 tokens, and dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fmlab.sim.dry import dry_run
from fmlab.sim.report import DryRun

KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, Table 5"
NARAYANAN = "Narayanan et al. 2021, arXiv:2104.04473, Table 1"
ADAPTERS = 8 * 200e9 / 8  # bytes a second of a host, one way

_SHAPES = {  # layers, width, heads
    "22B": (48, 6144, 64),
    "39.1B": (48, 8192, 64),
    "76.1B": (60, 10240, 80),
    "175B": (96, 12288, 96),
    "310B": (96, 16384, 128),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}


@dataclass(frozen=True)
class PublishedStep:
    """A step that somebody timed.

    seconds: quoted, or worked out from quoted FLOP/s by the formula of their paper (then `how` says so)
    split: fields of fmlab.sim.split.Split
    """

    name: str
    shape: str
    seconds: float
    global_batch: int
    source: str
    split: Mapping[str, Any] = field(hash=False)
    how: str = "step time"

    @property
    def chips(self) -> int:
        """Chips that it ran on."""
        return int(self.split["tensor"] * self.split.get("pipeline", 1) * self.split.get("data", 1))

    def dry_run(self, rates: str = "peak", **changes: Any) -> DryRun:
        """The modelled step; changes: of dry_run's arguments."""
        layers, width, heads = _SHAPES[self.shape]
        config = dict(num_layers=layers, hidden_size=width, num_heads=heads, vocab_size=51200, dropout=0.1)
        settings: dict[str, Any] = dict(
            host="p4de.24xlarge",
            network_bandwidth=ADAPTERS,
            config=config,
            seq_len=2048,
            global_batch=self.global_batch,
            attention="unfused",
            rates=rates,
            **self.split,
        )
        return dry_run("gpt3-175b", **settings | changes)


def _korthikanti(shape: str, full: float, present: float, batch: int, **split: Any) -> list[PublishedStep]:
    both = dict(tensor=8, **split)
    return [
        PublishedStep(
            f"{shape}, full recompute", shape, full, batch, KORTHIKANTI, both | dict(recompute="full")
        ),
        PublishedStep(
            f"{shape}, selective recompute, sequence parallel",
            shape,
            present,
            batch,
            KORTHIKANTI,
            both | dict(recompute="selective", sequence_parallel=True),
        ),
    ]


def _narayanan(shape: str, teraflops: float, batch: int, **split: Any) -> PublishedStep:
    """Their FLOPs of a step, 96 B s l h^2 (1 + s/6h + V/16lh), over quoted FLOP/s a chip and the chips."""
    layers, h, _ = _SHAPES[shape]
    s, vocabulary = 2048, 51200
    flops = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    step = dict(tensor=8, recompute="full", **split)
    chips = 8 * split["pipeline"] * split["data"]
    seconds = flops / (teraflops * 1e12 * chips)
    return PublishedStep(
        f"{shape}, {chips} chips", shape, seconds, batch, NARAYANAN, step, f"{teraflops:g} TFLOP/s a chip"
    )


#: Every step; those of Narayanan et al. have replicas too.
PUBLISHED: tuple[PublishedStep, ...] = (
    *_korthikanti("22B", 1.42, 1.10, 4, micro_batches=1),
    *_korthikanti("175B", 18.13, 13.75, 64, pipeline=8, virtual_stages=3, micro_batches=64),
    *_korthikanti("530B", 49.05, 37.83, 280, pipeline=35, virtual_stages=3, micro_batches=280),
    *_korthikanti("1T", 94.42, 71.49, 512, pipeline=64, micro_batches=512),
    _narayanan("39.1B", 138, 1536, pipeline=2, data=32, micro_batches=12),
    _narayanan("76.1B", 140, 1792, pipeline=4, virtual_stages=3, data=32, micro_batches=28),
    _narayanan("310B", 155, 2160, pipeline=16, virtual_stages=2, data=15, micro_batches=144),
    _narayanan("1T", 163, 3072, pipeline=64, data=6, micro_batches=512),
)


def published(name: str) -> PublishedStep:
    """The step called `name`; ValueError lists all."""
    for one in PUBLISHED:
        if one.name == name:
            return one
    raise ValueError(f"no published step {name!r}; known: {'; '.join(one.name for one in PUBLISHED)}")
