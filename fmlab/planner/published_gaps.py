"""What the published record leaves open: what is filled in, and from where; and what cannot be predicted.

A publication rarely prints everything. Where its own code or the model's public shape settles what is
missing, the gap is filled and the row says so in `assumed`. Where nothing settles it, the row says so in
`cannot`.
"""

import re
from typing import TYPE_CHECKING, Any

from fmlab.planner import reported

if TYPE_CHECKING:
    from fmlab.planner.published import PublishedRun

#: Groups of MaxText's: a step is one micro-batch, and recomputing is on unless a row says otherwise.
MAXTEXT = ("MaxText", "tpu-recipes", "JAX-Toolbox MaxText")
#: Groups of Megatron-Core's: states are divided by the distributed optimizer, the sequence by tensor ranks.
MEGATRON_CORE = ("Megatron-Bridge", "Megatron-LM Llama3", "NeMo")
#: Vocabularies of models whose rows give every size but that.
VOCABULARIES = {"llama2": 32000, "llama3": 128256, "gpt3": 51200}
#: FlashAttention was published in May 2022 (Dao et al., arXiv:2205.14135); before, scores went to memory.
FUSED_SINCE = "2022-06"
MIXTURES = re.compile(r"_a\d+b|deepseek|gpt oss|kimi|nemotron_3|mixtral", re.IGNORECASE)


def assumptions(row: dict[str, str], filled: dict[str, Any], tensor: int, pipeline: int) -> tuple[str, ...]:
    """Fill what `filled` lacks, in place, and say what was filled in."""
    said: list[str] = []
    _sizes(row, filled, tensor, said)
    _parallelism(row, filled, tensor, said)
    _batch(row, filled, pipeline, said)
    return tuple(said)


def _sizes(row: dict[str, str], filled: dict[str, Any], tensor: int, said: list[str]) -> None:
    model = row["model"].lower().replace(" ", "").replace("-", "").replace(".1", "")
    filled["gated"] = "swiglu" in row["arch_notes"].lower() or model.startswith(("llama", "mistral", "qwen"))
    hidden = filled["hidden"]
    if hidden and not filled["ffn"] and not filled["gated"] and model.startswith("gpt"):
        filled["ffn"] = 4 * hidden
        said.append("feed-forward width: four times the hidden width, as GPT has it")
    if hidden and not filled["heads"] and model.startswith("gpt"):
        fits = [width for width in range(128, 0, -1) if hidden % (width * tensor) == 0]
        filled["heads"] = hidden // fits[0]
        said.append(f"heads: of width {fits[0]}, the widest up to 128 that {tensor} tensor ranks can divide")
    if filled["heads"] and not filled["kv_heads"]:
        filled["kv_heads"] = filled["heads"]
    named = re.search(r"head_dim (\d+)", row["arch_notes"])
    if named:
        filled["head_width"] = int(named[1])
    elif hidden and filled["heads"]:
        filled["head_width"] = hidden // filled["heads"]
    family = next((name for name in VOCABULARIES if model.startswith(name)), None)
    if filled["layers"] and not filled["vocab"] and family:
        filled["vocab"] = VOCABULARIES[family]
        said.append(f"vocabulary: {filled['vocab']}, as the model's public shape has it")


def _parallelism(row: dict[str, str], filled: dict[str, Any], tensor: int, said: list[str]) -> None:
    if filled["virtual_stages"] is None and row["vpp"] != "yes":
        filled["virtual_stages"] = 1
    if filled["sequence_parallel"] is None:
        filled["sequence_parallel"] = tensor > 1 and row["group"].startswith((*MEGATRON_CORE, *MAXTEXT))
        if filled["sequence_parallel"]:
            said.append("sequence parallel: on with tensor parallelism, as in this framework's recipes")
    if row["group"].startswith(MEGATRON_CORE) and not row["fsdp_zero"]:
        filled["sharding"] = "zero1"
        said.append("states: divided by the distributed optimizer, as in this framework's recipes")
    early = bool(row["date"]) and row["date"] < FUSED_SINCE
    if early or row["group"].startswith("Megatron 2020") or row["id"].startswith("trn1-bert"):
        filled["attention"] = "unfused"
        said.append("attention: not fused, as in this code at the time")
    if row["group"] == "torchtitan" and row["recompute"] == "selective":
        filled["recompute"] = "half"  # its default chooses among operators, not Megatron's core of attention
    if filled["recompute"] is None and row["layers"]:
        filled["recompute"] = "full" if row["group"].startswith(MAXTEXT) else "none"
        said.append(f"recompute: {filled['recompute']}, this framework's default")


def _batch(row: dict[str, str], filled: dict[str, Any], pipeline: int, said: list[str]) -> None:
    data = filled["data"]
    if data and filled["global_batch"] and row["group"].startswith(MAXTEXT):
        filled["micro_batches"], filled["micro_batch"] = 1, filled["global_batch"] // data
    if row["group"] == "torchtitan" and pipeline > 1:
        filled["micro_batch"] = None  # the batch of a rank is printed, into how many parts it is cut is not
    if data and filled["micro_batch"] and not filled["global_batch"]:
        filled["micro_batches"] = filled["micro_batches"] or 1
        filled["global_batch"] = filled["micro_batch"] * data * filled["micro_batches"]
        said.append("global batch: one micro-batch on every data rank")
    if data and filled["micro_batch"] and filled["global_batch"]:
        filled["micro_batches"] = filled["global_batch"] // (data * filled["micro_batch"])


def why_not(run: "PublishedRun") -> str:
    """Why the planner cannot predict a row: one sentence; empty where it can."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
    missing = [name for name in sizes if not getattr(run, name)]
    layout = [
        name for name in ("chips", "precision", "global_batch", "micro_batch") if not getattr(run, name)
    ]
    if "lora" in run.model.lower():
        return "LoRA: most weights are frozen, and the planner plans the training of all"
    if missing and MIXTURES.search(run.model):
        return f"a mixture of experts whose {', '.join(missing)} the row does not give"
    if not reported.has_result(run):
        return "no time of a step, and nothing that one can be computed from"
    if run.layers == 1:
        return "one layer's time alone, not a step's"
    if missing:
        return f"the row does not give {', '.join(missing)}"
    if run.chip is None:
        return f"chip {run.chip_printed!r} is not in fmlab.chips, or not said exactly"
    if layout:
        return f"the row does not give {', '.join(layout)}"
    if run.precision == "int8":
        return "int8: the planner has no rates for it"
    if run.arch.startswith("encoder, MLM+NSP, LAMB"):
        return "rows are padded to bins of 64 tokens: how many tokens were computed is not printed"
    if run.virtual_stages is None:
        return "interleaved, and the number of virtual stages is not printed"
    return _not_even(run) or _only_by_a_wrong_size(run)


def _only_by_a_wrong_size(run: "PublishedRun") -> str:
    """8 N D with a rounded N, and no time to check it with."""
    timed = run.step_printed is not None or run.tokens_second_chip is not None
    if run.convention != "8ND" or timed or run.params is None:
        return ""
    share = reported.shape(run).parameters / run.params - 1
    if abs(share) < 0.06:
        return ""
    return f"only a rate by 8 N D, and the printed N is {abs(share):.0%} off the shape's parameters"


def _not_even(run: "PublishedRun") -> str:
    ranks = (run.data or 0) * run.tensor * run.pipeline * run.context
    if ranks != run.chips:
        return f"{run.chips} chips are not {run.data} x {run.tensor} x {run.pipeline} x {run.context} ranks"
    rows = (run.data or 0) * (run.micro_batch or 0) * (run.micro_batches or 0)
    if rows != run.global_batch:
        parts = f"{run.micro_batches} x {run.micro_batch} on {run.data} ranks"
        return f"a batch of {run.global_batch} is not {parts}"
    return ""
