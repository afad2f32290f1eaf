"""Claims in circulation whose arithmetic slips, each done again from its own inputs.

    for slip in slips(): print(slip)

Each is a `Disagreement`: `theirs` as printed (quoted), `ours` from the same inputs by the same rule (6 N D,
the stated peak; modelled), so that nothing but the slip lies between the two.
"""

from fmlab.chips import chip
from fmlab.planner.budget import training_flops
from fmlab.planner.calculators import Disagreement

DAY = 86_400  # seconds


# region slips
def one_chip_for_all() -> Disagreement:
    """The FLOPs of 16 GPUs over the peak of one: 16 times the utilisation.

    A 70-billion model, 500 steps of 16 rows of 2,048 tokens, one a GPU, in 13.5 hours on 16 A100.
    """
    flops = 6 * 70e9 * (2048 * 16 * 500)
    return Disagreement(
        "MFU of a fine-tuning of 70 billion parameters",
        0.4551,
        flops / (13.5 * 3600) / (16 * chip("a100-80gb").peak_flops("bf16")),
        "of the peak",
        "tokens of all 16 GPUs, divided by the peak of one",
        "a blog's text as quoted in github.com/huggingface/blog/issues/1649",
    )


def days_of_seven_billion() -> Disagreement:
    """GPU-days of 7 billion parameters and 2 trillion tokens at an A100's peak: 30 times too few."""
    return Disagreement(
        "A100-days of 7 billion parameters x 2 trillion tokens, at the peak",
        104,
        training_flops(7e9, 2e12) / chip("a100-80gb").peak_flops("bf16") / DAY,
        "GPU-days",
        "6 N D is 8.4e22 and takes 2.7e8 GPU-seconds; 9 million are printed, and 7,500 dollars for 224,000",
        "theneuralbase.com/llm-fundamentals, Training cost estimates",
    )


def dense_peak_doubled() -> Disagreement:
    """An H100's rate with sparsity as the peak: half of the utilisation."""
    reached = 480e12  # FLOP/s a GPU, of 9,600 tokens/s
    return Disagreement(
        "MFU of 7 billion parameters at 9,600 tokens/s a GPU",
        0.243,
        reached / chip("h100").peak_flops("bf16"),
        "of the peak",
        "1,979 TFLOP/s are with 2:4 sparsity; dense matrices have 989",
        "github.com/foundation-model-stack/fms-fsdp/issues/89",
    )


def gpu_hours_of_seven_billion() -> Disagreement:
    """GPU-hours of 7 billion parameters and a trillion tokens at 1,000 TFLOP/s: 23 times too few."""
    return Disagreement(
        "H100-hours of 7 billion parameters x 1 trillion tokens, at 1,000 TFLOP/s",
        500,
        training_flops(7e9, 1e12) / 1e15 / 3600,
        "GPU-hours",
        "6 N D is 4.2e22; and 1,000 TFLOP/s is no 50 % of a peak of 989 but of one with sparsity",
        "zubnet.ai/wiki/en/FLOPs",
    )


# endregion


def slips() -> tuple[Disagreement, ...]:
    """All of them."""
    return (one_chip_for_all(), days_of_seven_billion(), gpu_hours_of_seven_billion(), dense_peak_doubled())


def accumulation_left_out(micro_batches: int) -> Disagreement:
    """A meter that takes one micro-batch's FLOPs over a whole step's time reports 1/m of the utilisation."""
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: give 1 or more")
    return Disagreement(
        f"FLOPs of a step of {micro_batches} micro-batches",
        1,
        micro_batches,
        "micro-batches",
        "FLOPs of one micro-batch over the seconds of all",
        "github.com/Lightning-AI/litgpt/issues/403",
    )


def gb_as_gib(gigabytes: float) -> Disagreement:
    """GB (10^9) read as GiB (2^30), or printed so: 7 % of memory that is not there."""
    return Disagreement(
        f"{gigabytes:g} GB",
        gigabytes * 2**30,
        gigabytes * 1e9,
        "bytes",
        "2^30 bytes are 7.4 % more than 10^9; DeepSpeed's estimator prints the first as GB",
        "DeepSpeed 0.19, runtime/zero/stage_1_and_2.py",
    )
