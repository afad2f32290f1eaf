"""Published runs as the planner sees them: the same model, layout and chips, and the seconds of a step.

    predict(run)                      seconds, with what the planner was calibrated to
    predict(run, Calibration())       with the documented defaults
    lines(run)                        line by line

What a row cannot say of its framework is said here, once for each group: how states are kept, and what joins
the hosts.
"""

from functools import lru_cache
from itertools import pairwise

from fmlab.parallel import Layout
from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.hardware import Hardware, hardware
from fmlab.planner.published import PublishedRun
from fmlab.planner.setup import STATES, Setup
from fmlab.planner.time import step_lines

# What follows is of whole publications: what no source at hand states is listed, with its reason, in
# fmlab.planner.assumed.

#: Groups whose gradients are summed in fp32.
FP32_GRADIENTS = ("Megatron-Bridge", "Megatron-LM Llama3", "NeMo", "torchtitan", "AWS")
#: Groups that send messages of tensor ranks and of stages while they compute.
HIDES = ("Megatron-Bridge", "Megatron-LM Llama3", "NeMo", "MaxText", "tpu-recipes")
#: Groups with FlashAttention-2, also on chips that later kernels were written for.
FLASH_2 = ("llm-foundry", "torchtitan")
#: Groups whose tensor ranks each send a part of the stream to the next stage, and gather it there
#: (Narayanan et al. 2021, section 4.1).
SCATTERS = ("Megatron SC21", "Korthikanti")
#: Groups whose operators run one by one; all others are compiled, or have kernels that were fused by hand.
EAGER = ("llm-foundry", "NVIDIA BERT")
#: (beginning of the group, chip) -> bits a second that a host has to others, one way; the first that fits.
NETWORKS = (
    ("Megatron SC21", "a100-80gb", 8 * 200e9),
    ("Korthikanti", "a100-80gb", 8 * 200e9),
    ("BigScience", "a100-80gb", 4 * 100e9),
    ("Other published", "a100-80gb", 4 * 100e9),
    ("", "h100-96gb", 8 * 400e9),
    ("", "h200", 8 * 400e9),
    ("", "b200", 8 * 400e9),
    ("", "b300", 8 * 800e9),
    ("", "gb200", 4 * 400e9),
    ("", "gb300", 4 * 800e9),
    ("", "a100-40gb", 8 * 200e9),
    ("", "a100-80gb", 8 * 200e9),
)


@lru_cache(maxsize=1024)
def setup_of(run: PublishedRun, again: str) -> Setup:
    """A row's model and layout; again: what is computed again, as the planner names it."""
    assert not run.cannot
    cuts = _table_cuts(run)
    virtual = int(run.virtual_stages or 1) if cuts else _virtual_stages(run)
    many = (run.data or 0) > 1
    fully = run.sharding in ("fsdp", "zero2") and many
    layout = Layout(
        data=int(run.data or 0),
        micro_batches=int(run.micro_batches or 0),
        precision="bf16",
        zero=1 if run.sharding == "zero1" and many else 0,
        fsdp=fully,
        reshard=run.sharding != "zero2" or not fully,
        replicas=run.replicas if fully else 1,
        tensor=run.tensor,
        sequence_parallel=run.sequence_parallel and run.tensor > 1,
        pipeline=run.pipeline,
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        stage_cuts=cuts or "even",
        context=run.context,
        recompute=again,
    )
    shape = run.shape()
    return Setup(
        shape=shape,
        layout=layout,
        rows=int(run.micro_batch or 0),
        lengths=shape.lengths(run.seq_len),
        precision=str(run.precision),
        states=STATES["mixed-18" if run.group.startswith(FP32_GRADIENTS) else "mixed-16"],
        attention=run.attention,
        dropout=run.attention == "unfused",
        recompute=again,
    )


def _table_cuts(run: PublishedRun) -> tuple[int, ...]:
    """Where a pipeline is cut by frameworks that count the tables at both ends as layers (Megatron-Core's
    account_for_embedding_in_pipeline_split and …_loss_…), if layers alone do not divide evenly."""
    layers, virtual = int(run.layers or 0), int(run.virtual_stages or 1)
    chunks, blocks = run.pipeline * virtual, layers + 2
    if virtual > 1 and int(run.micro_batches or 0) % run.pipeline:
        return ()
    if chunks == 1 or layers % chunks == 0 or blocks % chunks:
        return ()
    return tuple(range(blocks // chunks, blocks, blocks // chunks))


def _virtual_stages(run: PublishedRun) -> int:
    """Of the printed number or fewer, the most with which the fullest stage has as few layers as can be. (The
    tables of some frameworks count as layers, so that there are more chunks than layers.)"""
    micro_batches, layers = int(run.micro_batches or 0), int(run.layers or 0)
    if run.pipeline == 1 or micro_batches % run.pipeline:
        return 1
    most = min(run.virtual_stages or 1, layers // run.pipeline)

    def fullest(virtual: int) -> int:
        chunks = run.pipeline * virtual
        starts = [i * layers // chunks for i in range(chunks + 1)]
        sizes = [end - begin for begin, end in pairwise(starts)]
        return max(sum(sizes[stage :: run.pipeline]) for stage in range(run.pipeline))

    return min(range(1, most + 1), key=lambda virtual: (fullest(virtual), -virtual))


def older(run: PublishedRun) -> str:
    """The name in `attention_of` of FlashAttention-2 on Hopper, where a row has it: llm-foundry's, and
    PyTorch's own, which torchtitan uses: 35 % of an H100's peak, where kernels written for Hopper reach 75 %
    (Shah et al. 2024, arXiv:2407.08608, abstract). Empty for all other rows."""
    hopper = str(run.chip).startswith(("h100", "h200"))
    return "hopper flash-2" if hopper and run.group.startswith(FLASH_2) else ""


def machine_of(run: PublishedRun, calibration: Calibration | None = None) -> Hardware:
    """A row's chip in its host, and what its framework hides."""
    one = fitted() if calibration is None else calibration
    hides = run.group.startswith(HIDES)
    if not (hides or "async TP" in run.notes):
        one = one.changed(hidden_tensor=0.0)
    if not hides:
        scattered = run.tensor > 1 and not run.sequence_parallel and run.group.startswith(SCATTERS)
        one = one.changed(hidden_pipeline=1 - 1 / run.tensor if scattered else 0.0)
    if run.group.startswith(EAGER):
        one = one.changed(passes=one.passes_eager)
    if older(run) in one.attention_of:
        one = one.changed(attention_of={**one.attention_of, str(run.chip): one.attention_of[older(run)]})
    return hardware(str(run.chip), None, _network(run.group, str(run.chip)), one)


@lru_cache(maxsize=1024)
def _network(group: str, chip: str) -> float | None:
    """Bytes a second of a host."""
    fits = (bits for begins, name, bits in NETWORKS if group.startswith(begins) and name == chip)
    found = next(fits, None)
    return None if found is None else found / 8


def predict(run: PublishedRun, calibration: Calibration | None = None) -> float:
    """Seconds of a step. Raises ValueError for a row that cannot be predicted."""
    return sum(lines(run, calibration).values())


def lines(run: PublishedRun, calibration: Calibration | None = None) -> dict[str, float]:
    """Seconds of each line of a step."""
    if run.cannot:
        raise ValueError(f"{run.id} cannot be predicted: {run.cannot}")
    machine = machine_of(run, calibration)
    if run.recompute == "half":  # between none and all
        none, full = (_lines(run, again, machine) for again in ("none", "full"))
        return {name: (none.get(name, 0.0) + full.get(name, 0.0)) / 2 for name in none | full}
    again = {"none": "none", "attention": "selective"}.get(str(run.recompute), "full")
    return _lines(run, again, machine)


def _lines(run: PublishedRun, again: str, machine: Hardware) -> dict[str, float]:
    setup = setup_of(run, again)
    setup.shape.memo.clear()  # what is kept for one calibration is of no use to the next
    return step_lines(setup, machine)
