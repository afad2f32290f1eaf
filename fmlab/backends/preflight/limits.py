"""What the chips of a vendor ask of a program, as far as a source says it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from fmlab.backends.preflight.finding import Finding, Severity
from fmlab.chips import Chip


@dataclass(frozen=True)
class Limits:
    """The rules of one family of chips.

    inner, rows, columns: the matrix unit's tile: this much of the contracted dim, of one result dim and of
        the other in one instruction; a smaller rest takes as long
    doubles:      how bad float64 is, and why
    shaped:       how bad a result is whose shape depends on numbers
    instructions: the most that the compiler takes in one program; None where no such limit is known
    attention:    the fused attention kernel wants query lengths that are multiples of this; None: no rule
    """

    vendor: str
    inner: int
    rows: int
    columns: int
    doubles: tuple[Severity, str]
    shaped: Severity
    instructions: int | None = None
    attention: int | None = None


#: AWS: 128 partitions, matrix instructions of 128 x 128 by 512 (NKI programming guide; nki.isa.nc_matmul), no
#: 64-bit floats (Neuron data types). 5,000,000 instructions: the compiler's message, quoted in reports of
#: aws-neuron-sdk (#1003, #987, #819). 2048: TorchNeuron, TORCH_NEURONX_ENABLE_NKI_SDPA.
_AWS = Limits("AWS", 128, 128, 512, ("error", "NeuronCores have no float64"), "error", 5_000_000, 2048)
#: Google: matrix unit of 128 x 128 (256 x 256 from v6e on, not counted here), vectors of 8 x 128; float64 is
#: emulated by the compiler (Cloud TPU documentation, system architecture and bfloat16 pages).
_GOOGLE = Limits("Google", 128, 8, 128, ("warning", "TPUs compute float64 in software, slowly"), "warning")
FAMILIES = {"AWS": _AWS, "Google": _GOOGLE}
_NATIVE = ("trn2", "trn3")  # chips of native TorchNeuron, which has the fused attention kernel

#: Logical cores that a job of one host may use: trn1 (torch_neuronx on XLA; optimum-neuron #339, #424).
CORE_COUNTS = {"trn1": (1, 2, 8, 32)}
#: Devices of a chip, by the logical core of 1 or 2 physical ones; others are one device.
DEVICES = {"trn1": {1: 2}, "inf2": {1: 2}, "trn2": {1: 8, 2: 4}, "trn3": {1: 8, 2: 4}, "tpu-v7": {1: 2}}


def limits_of(chip: Chip) -> Limits:
    """The rules of this chip. Raises ValueError for one without a static-shape compiler, or without rules."""
    if chip.compiler != "static-shape" or chip.vendor not in FAMILIES:
        raise ValueError(
            f"there is no pre-flight for {chip.name}: it is for chips with a static-shape compiler of "
            f"{' or '.join(FAMILIES)}"
        )
    limits = FAMILIES[chip.vendor]
    return limits if chip.name in _NATIVE else replace(limits, attention=None)


def devices_of(chip: str, logical_core: int | None = None) -> int:
    """How many devices a chip is. Raises ValueError for a logical core that it does not have."""
    choices = DEVICES.get(chip, {1: 1})
    if logical_core is None:
        return choices[max(choices)]
    if logical_core not in choices:
        raise ValueError(f"logical_core={logical_core}: {chip} has {', '.join(map(str, choices))}")
    return choices[logical_core]


def check_cores(chip: str, cores: int) -> list[Finding]:
    """Whether a host of this chip runs on `cores` logical cores, as far as it is known."""
    legal = CORE_COUNTS.get(chip)
    if legal is None or cores in legal or cores % max(legal) == 0:
        return []
    below = max((count for count in legal if count < cores), default=legal[0])
    words = ", ".join(map(str, legal))
    return [
        Finding(
            "error",
            "cores",
            f"a {chip} host does not run a job on {cores} cores; it takes {words}, or whole hosts",
            "the launch",
            f"use {below} or {next((c for c in legal if c > cores), max(legal))} cores",
        )
    ]


def tiles(limits: Limits, product: tuple[int, int, int, int]) -> tuple[int, float]:
    """Of one batched matrix product: (instructions, part of their work that is useful), in the better of the
    two ways to lay it on the unit.

    product: (batch, rows, inner, columns).
    """
    batch, m, k, n = product
    ways = []
    for rows, columns in ((m, n), (n, m)):
        steps = ceil(k / limits.inner), ceil(rows / limits.rows), ceil(columns / limits.columns)
        padded = steps[0] * limits.inner * steps[1] * limits.rows * columns
        ways.append((batch * steps[0] * steps[1] * steps[2], m * k * n / padded))
    return min(ways, key=lambda way: (-way[1], way[0]))


def check_products(
    limits: Limits, products: Sequence[tuple[tuple[int, int, int, int], int]]
) -> tuple[list[Finding], int, float]:
    """Alignment and size of all matrix products of a step: (findings, instructions at least, useful part).

    products: (product, how often).
    """
    instructions, work, spent = 0, 0.0, 0.0
    worst: tuple[float, tuple[int, int, int, int]] | None = None
    for product, times in products:
        count, useful = tiles(limits, product)
        flops = 2.0 * product[0] * product[1] * product[2] * product[3] * times
        instructions += count * times
        work, spent = work + flops, spent + flops / useful
        lost = flops / useful - flops
        worst = max(worst or (lost, product), (lost, product))
    share = work / spent if spent else 1.0
    found = []
    if share < 0.9 and worst is not None:
        batch, m, k, n = worst[1]
        found.append(
            Finding(
                "note",
                "tiles",
                f"{1 - share:.0%} of the matrix unit's work is padding; most of it in products of {batch} x "
                f"[{m},{k}] by [{k},{n}]",
                "the sizes of the model",
                f"make widths of layers and heads, and rows (batch x tokens), multiples of {limits.inner}",
            )
        )
    if limits.instructions is not None and instructions > limits.instructions:
        found.append(
            Finding(
                "error",
                "graph size",
                f"at least {instructions:,} matrix instructions in one program, over the compiler's "
                f"{limits.instructions:,}",
                "the step",
                "use smaller micro-batches or sequences, tensor parallelism, or compile layer by layer",
            )
        )
    return found, instructions, share
