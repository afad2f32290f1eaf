"""Checkers of notebook 2.5."""

import math

from fmlab.lab.exercises import Answer, NotYet, exercise

#: ranks, query heads, key/value heads, rows of a head
DIVISIONS = ((2, 8, 4, 3), (4, 8, 2, 2), (4, 4, 1, 5), (2, 6, 6, 2), (6, 12, 3, 1))

#: query heads, key/value heads, hidden units, most ranks
DECODERS = ((28, 4, 18944, 32), (32, 8, 14336, 40), (12, 12, 3072, 12), (24, 6, 96, 24))


@exercise("2.5.1", "split a fused query-key-value matrix", returns=list)
def rows_of(answer: Answer) -> str:
    for ranks, heads, kv_heads, size in DIVISIONS:
        for rank in range(ranks):
            right = _heads_of(rank, ranks, heads, kv_heads)
            got = list(answer(rank, ranks, heads, kv_heads, size))
            if got != [head * size + row for head in right for row in range(size)]:
                raise _wrong_rows(got, right, rank, ranks, heads, kv_heads, size)
    return "as many, fewer and a single key/value head"


def _heads_of(rank: int, ranks: int, heads: int, kv_heads: int) -> list[int]:
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    used = sorted({i // (heads // kv_heads) for i in mine})
    return [*mine, *(heads + g for g in used), *(heads + kv_heads + g for g in used)]


def _wrong_rows(
    got: list[int], right: list[int], rank: int, ranks: int, heads: int, kv_heads: int, size: int
) -> NotYet:
    what = f"got {got} for rank {rank} of {ranks}, {heads} and {kv_heads} heads of {size} rows"
    rows = (heads + 2 * kv_heads) * size
    if got == list(range(rank * rows // ranks, (rank + 1) * rows // ranks)):
        return NotYet(
            what,
            "that is an equal piece of the whole matrix: some ranks get queries only",
            "divide queries, keys and values each by themselves",
        )
    if size > 1 and got == right:
        return NotYet(
            what, "those are numbers of heads", f"head i has the rows {size}i .. {size}i + {size - 1}"
        )
    found = sorted({row // size for row in got})
    keys = [head - heads for head in found if heads <= head < heads + kv_heads]
    used = [head - heads for head in right if heads <= head < heads + kv_heads]
    if not keys:
        return NotYet(
            what,
            f"rank {rank} has no keys: {kv_heads} heads, and every rank needs one",
            "a key/value head may be on several ranks",
        )
    if set(used) < set(keys):
        return NotYet(
            what, "that is more keys than its queries use", "which key/value head does query head i use?"
        )
    if keys != used:
        return NotYet(
            what,
            f"key head {keys[0]} is of another rank's queries",
            "neighbouring ranks share a head: start from the query heads of this rank",
        )
    if sorted(got) == [head * size + row for head in right for row in range(size)]:
        return NotYet(what, "these are the right rows in another order", "queries, then keys, then values")
    return NotYet(
        what,
        f"rank {rank} has the query heads {right[: heads // ranks]} and uses key/value heads {used}",
        "values lie behind all keys",
    )


@exercise("2.5.2", "a loss over divided words", returns=float)
def loss_of(answer: Answer) -> str:
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(25)
    for vocabulary, ranks, target, offset in ((12, 3, 7, 0.0), (10, 4, 9, -20.0), (9, 2, 0, 990.0)):
        logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64) + offset
        logits[vocabulary // 2] += 3
        words = -(-vocabulary // ranks)
        shards = list(F.pad(logits, (0, words * ranks - vocabulary)).chunk(ranks))
        right = -logits.log_softmax(0)[target].item()
        got = answer([shard.clone() for shard in shards], target, vocabulary)
        if math.isclose(got, right, abs_tol=1e-6):
            continue
        what = f"got {got:.4f}, not {right:.4f}, for {vocabulary} words on {ranks} ranks, target {target}"
        if not math.isfinite(got):
            raise NotYet(
                what,
                "the exponential of a logit of 1000 is too large for a float",
                "subtract the largest logit of all ranks first, and put it back at the end",
            )
        own = shards[target // words][: vocabulary - target // words * words]
        if math.isclose(got, -own.log_softmax(0)[target % words].item(), abs_tol=1e-6):
            raise NotYet(
                what,
                "that is the loss of one rank's words alone",
                "the sum of the exponentials is over the words of all ranks",
            )
        padded = -torch.cat(shards).log_softmax(0)[target].item()
        if math.isclose(got, padded, abs_tol=1e-6):
            raise NotYet(
                what,
                "a padded word has a probability here: its logit of 0 counts",
                "cut off the words from `vocabulary` on, or give them a logit of -inf",
            )
        each = sum((shard - shard.max()).exp().sum() for shard in logits.split(words))
        if math.isclose(got, float(logits.max() + each.log() - logits[target]), abs_tol=1e-6):
            raise NotYet(
                what,
                "each rank subtracted its own largest logit, and their sums do not fit together",
                "take the largest of all ranks first",
            )
        raise NotYet(
            what,
            "the loss is log(sum of the exponentials) minus the target's logit",
            f"the target is word {target % words} of rank {target // words}",
        )
    return "even and padded vocabularies, small and huge logits"


@exercise("2.5.3", "legal degrees", returns=list)
def legal(answer: Answer) -> str:
    for heads, kv_heads, ffn, most in DECODERS:
        right = [t for t in range(1, most + 1) if _fits(t, heads, kv_heads, ffn)]
        got = list(answer(heads, kv_heads, ffn, most))
        if got == right:
            continue
        what = f"got {got} for {heads} heads, {kv_heads} for keys and values, ffn={ffn}"
        for t in sorted(set(got) - set(right)):
            if heads % t:
                raise NotYet(what, f"{t} ranks tear a query head apart", "each rank needs whole heads")
            if ffn % t:
                raise NotYet(
                    what,
                    f"the feed-forward network cannot be divided by {t}",
                    "its hidden units must be divided evenly too",
                )
            raise NotYet(
                what,
                f"{kv_heads} key/value heads cannot be copied to equally many ranks of {t}",
                "one number must divide the other",
            )
        missing = sorted(set(right) - set(got))
        if missing and missing[0] > kv_heads:
            raise NotYet(
                what,
                f"{missing[0]} ranks are possible with fewer key/value heads than ranks",
                "each head is then copied to several ranks",
            )
        raise NotYet(what, f"something is missing: {missing or 'the order is not ascending'}", "count from 1")
    return "Qwen2-7B, Llama-3-8B, GPT-2 and one that fits badly"


def _fits(t: int, heads: int, kv_heads: int, ffn: int) -> bool:
    return heads % t == 0 and ffn % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
