"""From what a publication reports to the seconds of a step, by the row's own way of counting.

"TFLOP/s" and "MFU" mean different things in different publications: whether every pair of positions of
attention counts or only the half that a causal mask leaves, and whether a forward pass that is done a second
time counts. Steps and tokens a second mean one thing, so that predictions are compared on those.

    flops_per_token(run, "full-attention")   a convention of fmlab.planner.flops
    flops_per_token(run, "full-recompute")   full-attention, and the layers' forward pass once more: FLOPs
    done
                                             (Narayanan et al. 2021, arXiv:2104.04473, equation 3)
    flops_per_token(run, "8ND")              8 x the printed number of parameters: 4 passes of 2, no attention
"""

from typing import TYPE_CHECKING, Any

from fmlab.planner.flops import CONVENTIONS, flops_per_step
from fmlab.planner.shapes import ModelShape, bert_shape, gpt_shape, llama_shape

if TYPE_CHECKING:
    from fmlab.planner.published import PublishedRun

#: Labels of a BERT row: max_predictions_per_seq of NVIDIA's phases, by the length of the row.
BERT_LABELS = {128: 20, 512: 80}


def shape(run: "PublishedRun") -> ModelShape:
    """The model of a row. Raises ValueError where the row does not give every size."""
    needed = (run.layers, run.hidden, run.heads, run.kv_heads, run.head_width, run.ffn, run.vocab)
    if not all(needed) or run.seq_len is None:
        raise ValueError(f"{run.id}: the row does not give all sizes of the model")
    layers, hidden, heads, kv_heads, head_width, ffn, vocab = (int(size or 0) for size in needed)
    if "encoder" in run.arch or "BERT" in run.model:
        tuned = "fine-tuning" in run.arch
        return bert_shape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=vocab,
            ffn=ffn,
            head="classifier" if tuned else "pretraining",
            reads=BERT_LABELS.get(run.seq_len, 0) / run.seq_len or 0.15,
            name=run.model,
        )
    sizes: dict[str, Any] = dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab, ffn=ffn
    )
    if run.gated:
        return llama_shape(**sizes, head_width=head_width, name=run.model)
    plain = run.model.startswith(("MPT", "MaxText"))
    return gpt_shape(
        **sizes,
        head_width=head_width,
        positions=0 if run.model.startswith("MaxText") else run.seq_len,
        norm="layer without bias" if plain else "layer",
        bias=not plain,
        name=run.model,
    )


def flops_per_token(run: "PublishedRun", convention: str) -> float:
    """FLOPs of a training step for each token, as the convention counts them.

    Raises ValueError for an unknown convention and for a row without the sizes that it needs.
    """
    if convention == "8ND":
        if run.params is None:
            raise ValueError(f"{run.id}: '8ND' needs the number of parameters")
        return 8 * run.params
    one, length = shape(run), int(run.seq_len or 0)
    if convention == "full-recompute":
        return flops_per_step(one, 1, length, recompute="full").hardware / length
    if convention not in CONVENTIONS:
        known = ", ".join([*CONVENTIONS, "full-recompute", "8ND"])
        raise ValueError(f"{run.id}: unknown convention {convention!r}; known are {known}")
    return flops_per_step(one, 1, length, convention).model / length


def has_result(run: "PublishedRun") -> bool:
    """Whether the row reports anything that gives the seconds of a step (if it gives the sizes too)."""
    direct = (run.step_printed, run.tokens_second, run.tokens_second_chip, run.sequences_second)
    rates = run.convention is not None and (run.tflops is not None or run.mfu is not None)
    return any(one is not None for one in direct) or rates


def step_seconds(run: "PublishedRun") -> float:
    """Seconds of a step: printed, or from the rate with the most digits. ValueError where nothing gives
    it."""
    if run.step_printed is not None:
        return run.step_printed
    return _step_tokens(run) / tokens_per_second(run)


def tokens_per_second(run: "PublishedRun") -> float:
    """Tokens a second of all chips together."""
    if run.tokens_second is not None:
        return run.tokens_second
    if run.sequences_second is not None and run.seq_len and run.tokens_second_chip is None:
        return run.sequences_second * run.seq_len
    if run.tokens_second_chip is not None and run.chips:
        return run.tokens_second_chip * run.chips
    if run.step_printed is not None:
        return _step_tokens(run) / run.step_printed
    return _flops_second(run) / flops_per_token(run, str(run.convention))


def _step_tokens(run: "PublishedRun") -> float:
    if not (run.global_batch and run.seq_len):
        raise ValueError(f"{run.id}: the row does not give how many tokens a step has")
    return run.global_batch * run.seq_len


def _flops_second(run: "PublishedRun") -> float:
    """FLOPs a second of all chips together, by the row's convention."""
    if run.convention is None or not run.chips:
        raise ValueError(f"{run.id}: no time of a step, and no rate whose way of counting is known")
    if run.tflops is not None:
        return run.tflops * 1e12 * run.chips
    if run.mfu is not None and run.peak_tflops is not None:
        return run.mfu * run.peak_tflops * 1e12 * run.chips
    raise ValueError(f"{run.id}: neither a time of a step nor a rate is reported")


def convention_ratio(run: "PublishedRun", convention: str) -> float:
    """Reported FLOPs a second over those that its own tokens a second mean under a convention.

    1 where the publication counts that way. Raises ValueError for a row that does not report both.
    """
    timed = (run.step_printed, run.tokens_second_chip, run.tokens_second)
    if all(one is None for one in timed):
        raise ValueError(f"{run.id}: only rates are reported, no time or tokens a second to check them with")
    return _flops_second(run) / (tokens_per_second(run) * flops_per_token(run, convention))
