"""Where other calculators differ from this planner, by how much, and why.

    for row in beside_zero_estimator(plan(...)): print(row)     DeepSpeed's estimator of ZeRO's states
    print(six_nd("gpt3-175b", 2048))                            6 N D beside the full count of FLOPs
    six_nd_off_at("llama3.1-8b", 0.10)                          from which length on 6 N D misses 10 %
    print(recompute_as_model("gpt3-175b", 2048, "full"))        HFU called MFU
    print(full_as_causal("llama3.1-8b", 131_072))               all pairs of positions, or half of them
    print(sparse_as_dense("a100-80gb"))                         a data sheet's "with sparsity"
    BYTES_A_PARAMETER["DeepSpeed, ZeRO 2"]                      16, 18 or 20 bytes, item by item

Each answer is a `Disagreement`: their number, ours, and the reason. fmlab.planner.slips has claims in which
one of these, or a plain slip, went by unnoticed. Everything here is modelled; sources are named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fmlab.chips import Chip
from fmlab.chips import chip as find_chip
from fmlab.parallel.values import above_zero, one_of, whole
from fmlab.planner.flops import RECOMPUTE, flops_per_step
from fmlab.planner.parts import MOST, Convolution, Embedding, LayerGroup, Part, Residual
from fmlab.planner.shapes import ModelShape, model_shape

if TYPE_CHECKING:
    from fmlab.planner.plan import Plan

OFFLOADS = ("none", "optimizer", "parameters")
_DEEPSPEED = "DeepSpeed 0.19, runtime/zero"


@dataclass(frozen=True)
class Disagreement:
    """One quantity as somebody else has it, and as this planner has it.

    theirs, ours: in `unit`. why: what one counts and the other does not. source: where theirs is from.
    """

    name: str
    theirs: float
    ours: float
    unit: str
    why: str
    source: str

    @property
    def ratio(self) -> float:
        """theirs / ours: above 1 where theirs is more."""
        return self.theirs / self.ours

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.theirs:.4g} {self.unit}, here {self.ours:.4g} ({self.ratio:.3g} x): "
            f"{self.why} [{self.source}]"
        )


# ---- bytes of a parameter ----------------------------------------------------------------------------------

#: who -> bytes of each parameter, item by item: mixed precision with Adam, before any rank divides it
BYTES_A_PARAMETER: Mapping[str, Mapping[str, int]] = {
    # arXiv:1910.02054, section 3.1: states="mixed-16"
    "ZeRO": {"weights": 2, "gradients": 2, "masters": 4, "moments": 8},
    # theoretical_memory_usage.py of Megatron-LM; gradients are summed in fp32: states="mixed-18"
    "Megatron": {"weights": 2, "fp32 gradients": 4, "masters": 4, "moments": 8},
    # stage3.py: 18, of which 2 stay on the chip where the optimizer is offloaded, and 16 go
    "DeepSpeed, ZeRO 3": {"weights": 2, "fp32 gradients": 4, "masters": 4, "moments": 8},
    # stage_1_and_2.py says these five in a comment
    "DeepSpeed, ZeRO 2": {"weights": 2, "gradients": 2, "fp32 gradients": 4, "masters": 4, "moments": 8},
}


# ---- DeepSpeed's estimator ---------------------------------------------------------------------------------


class ZeroEstimate(NamedTuple):
    """Bytes of model states by DeepSpeed's estimator: of a chip, and of a host's memory."""

    chip: int
    host: int


# region zero estimate
def zero_estimate(
    parameters: int,
    stage: int,
    *,
    chips_per_host: int = 1,
    hosts: int = 1,
    largest_layer: int = 0,
    offload: str = "none",
    buffer_factor: float = 1.5,
) -> ZeroEstimate:
    """What DeepSpeed's estimate_zero2_… and estimate_zero3_model_states_mem_needs say (zero_init=True).

    largest_layer: parameters of the largest module (stage 3 gathers it, at 4 bytes each).
    offload: "none", "optimizer" (with gradients to the host) or, for stage 3, "parameters" too.

    Raises ValueError for a stage without an estimator (there is none for 1), and for numbers that cannot be.
    """
    _check_estimate(parameters, stage, chips_per_host, hosts, largest_layer, offload, buffer_factor)
    chips = chips_per_host * hosts
    if stage == 2:
        if offload == "none":
            chip = 2 * parameters + int(18 * parameters / chips)
            return ZeroEstimate(chip, int(parameters * 4 * chips_per_host * buffer_factor))
        return ZeroEstimate(2 * parameters, int(parameters * max(4 * chips, 16) * buffer_factor))
    gathered = 4 * largest_layer
    if offload == "none":
        chip = gathered + int(18 * parameters / chips)
        return ZeroEstimate(chip, int(largest_layer * 4 * chips_per_host * buffer_factor))
    if offload == "optimizer":
        chip = gathered + int(2 * parameters / chips)
        return ZeroEstimate(chip, int(parameters * 16 / hosts * buffer_factor))
    return ZeroEstimate(gathered, int(parameters * 18 / hosts * buffer_factor))


# endregion


def _check_estimate(
    parameters: int, stage: int, chips: int, hosts: int, layer: int, offload: str, factor: float
) -> None:
    numbers = dict(parameters=parameters, chips_per_host=chips, hosts=hosts)
    for name, number in numbers.items():
        whole(number, f"{name}={number!r}")
    whole(layer, f"largest_layer={layer!r}", 0)
    above_zero(factor, f"buffer_factor={factor!r}", "give a factor above 0; DeepSpeed's own is 1.5")
    if stage not in (2, 3):
        raise ValueError(f"stage={stage!r}: DeepSpeed estimates ZeRO 2 and 3; `plan` knows all stages")
    legal = OFFLOADS if stage == 3 else OFFLOADS[:2]
    one_of(offload, legal, f"offload={offload!r} with stage={stage}")


def largest_module(model: str | ModelShape | Any) -> int:
    """Parameters of the largest single module, as the estimator finds it: a table, or a matrix of a layer.

    Our GPTs have queries, keys and values in one matrix, models with rotary positions in three.
    """
    return max(size for part in model_shape(model).parts for size in _modules(part))


def _modules(part: Part) -> Iterator[int]:
    """Parameters of a part's modules, the large ones."""
    if isinstance(part, Embedding):
        yield from (part.tokens * part.width, part.positions * part.width, part.matrices)
    elif isinstance(part, LayerGroup):
        queries = part.query_width + (0 if part.rotary else 2 * part.kv_width)
        yield (part.width + part.qkv_bias) * queries
        yield part.ffn * (part.width + part.ffn_bias)
        yield part.experts * part.expert_matrices  # ours are one module
    elif isinstance(part, Residual):
        yield part.outputs * (9 * max(part.inputs, part.outputs) + 1)
    elif isinstance(part, Convolution):
        yield part.matrices + part.outputs
    else:
        yield part.outputs * (part.width + part.output_bias)


def beside_zero_estimator(plan: "Plan") -> tuple[Disagreement, Disagreement]:
    """DeepSpeed's estimate for a plan's chips, beside the plan's states and beside all that a chip holds.

    Raises ValueError for a plan that the estimator does not know: it divides nothing but data ranks by ZeRO 2
    or 3.
    """
    setup, layout = plan.setup, plan.setup.layout
    if setup.stage_of_zero < 2 or layout.data != layout.world_size or setup.shards != layout.data:
        raise ValueError(
            f"{layout}: DeepSpeed's estimator knows data ranks with ZeRO 2 or 3 alone; plan with "
            "Layout(data=…, zero=2 or 3)"
        )
    shape, stage, ranks = setup.shape, setup.stage_of_zero, layout.data
    theirs = zero_estimate(
        shape.parameters,
        stage,
        chips_per_host=ranks,
        largest_layer=largest_module(shape) if stage == 3 else 0,
    ).chip
    lines = {name: line.value for name, line in plan.memory.items()}
    ours = sum(lines.get(name, 0.0) for name in ("weights", "gradients", "masters", "moments"))
    each, mine = (20 if stage == 2 else 18), setup.states.total
    why = f"{each} bytes a parameter, here {mine:g}: it counts gradients in fp32" + (
        " and in 16 bits" if stage == 2 else f", and {4 * largest_module(shape):,} bytes of a gathered layer"
    )
    rest = [name for name in lines if name not in ("weights", "gradients", "masters", "moments")]
    source = f"{_DEEPSPEED}/{'stage_1_and_2' if stage == 2 else 'stage3'}.py"
    return (
        Disagreement("model states of a chip", theirs, ours, "bytes", why, source),
        Disagreement(
            "all that a chip holds",
            theirs,
            plan.peak_memory,
            "bytes",
            f"it has no {', '.join(rest)}",
            source,
        ),
    )


# ---- FLOPs -------------------------------------------------------------------------------------------------

Lengths = int | Mapping[str, int] | None


def six_nd(model: str | ModelShape | Any, seq_len: Lengths = None) -> Disagreement:
    """6 N D beside matrices, attention (all pairs) and logits: FLOPs of one row, forward and backward.

    It counts tables that are only looked up, and no attention: more for short rows, less for long ones.
    Raises ValueError like `flops_per_step`.
    """
    shape = model_shape(model)
    theirs = flops_per_step(shape, 1, seq_len, "6nd").model
    ours = flops_per_step(shape, 1, seq_len)
    tables = sum(part.tables for part in shape.embeddings)
    tables -= sum(head.outputs * head.width for head in shape.heads if head.tied)
    return Disagreement(
        f"FLOPs of a row of {shape.name}",
        theirs,
        ours.model,
        "FLOPs",
        f"6 N D has no attention ({ours.attention / ours.model:.1%} here); {tables / shape.parameters:.1%} "
        "of its N are only looked up",
        "Kaplan et al. 2020, arXiv:2001.08361",
    )


def six_nd_off_at(model: str | ModelShape | Any, share: float) -> int | None:
    """The shortest row for which 6 N D is at least `share` below the full count; None where no row is.

    A limit of the model's positions is left out. ValueError for a model with several streams, whose rows have
    no one length, and for a share that is not between 0 and 1.
    """
    shape = replace(model_shape(model), positions=0)
    if not isinstance(share, float) or not 0 < share < 1:
        raise ValueError(f"share={share!r}: give a share between 0 and 1, such as 0.1 for 10 %")
    if len(shape.streams) > 1 or shape.streams[0].fixed:
        raise ValueError(f"{shape.name} works on {', '.join(shape.roles)}: its rows have no one length")

    def below(length: int) -> bool:
        return six_nd(shape, length).ratio <= 1 - share

    if not below(MOST):
        return None
    low, high = 0, MOST  # the ratio falls with the length: tables count for less, attention for more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return high


def recompute_as_model(
    model: str | ModelShape | Any, seq_len: Lengths = None, recompute: str = "full"
) -> Disagreement:
    """HFU called MFU: FLOPs that are computed again are counted as if the model asked for them.

    Full recomputation is nearly 4/3; selective, attention once more. Raises ValueError like `flops_per_step`.
    """
    one_of(recompute, RECOMPUTE, f"recompute={recompute!r}")
    one = flops_per_step(model_shape(model), 1, seq_len, recompute=recompute)
    return Disagreement(
        "utilisation",
        one.hardware,
        one.model,
        "FLOPs a row",
        f"recompute={recompute}: {one.recomputation:.4g} FLOPs are computed twice; HFU counts them, MFU not",
        "Korthikanti et al. 2022, arXiv:2205.05198, equations 7 to 9",
    )


def full_as_causal(model: str | ModelShape | Any, seq_len: Lengths = None) -> Disagreement:
    """All pairs of positions counted, beside half of a causal attention: two conventions, both in use."""
    shape = model_shape(model)
    full = flops_per_step(shape, 1, seq_len)
    half = flops_per_step(shape, 1, seq_len, "causal-halved")
    return Disagreement(
        f"FLOPs of a row of {shape.name}",
        full.model,
        half.model,
        "FLOPs",
        f"a causal kernel leaves half of the pairs out; attention: {full.attention / full.model:.1%} of all",
        "all pairs: Korthikanti et al. 2022, torchtitan, nanochat; half: Megatron-Core, MaxText since 2025",
    )


def sparse_as_dense(chip: str | Chip, dtype: str = "bf16", sparse: float | None = None) -> Disagreement:
    """A data sheet's rate with structured sparsity beside the dense one: every utilisation falls by as much.

    sparse: FLOP/s, where the catalogue has none for the chip. Raises ValueError for a chip without either.
    """
    one = find_chip(chip) if isinstance(chip, str) else chip
    figure, dense = one.figures().get(f"sparse.{dtype}"), one.peak_flops(dtype)
    if sparse is not None:
        above_zero(sparse, f"sparse={sparse!r}", "give FLOP/s above 0")
    elif figure is None:
        raise ValueError(f"no source gives a sparse {dtype} rate for {one.name}: give sparse= [FLOP/s]")
    return Disagreement(
        f"peak of {one.name} in {dtype}",
        figure.base if sparse is None and figure else float(sparse or 0),
        dense,
        "FLOP/s",
        "training multiplies dense matrices: the sparse rate skips zeros that are not there",
        figure.source if figure and sparse is None else "as given",
    )
