"""Checkers of notebook 0.1."""

from collections import Counter

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("0.1.1", "what comes next?", returns=list)
def next_pieces(answer: Answer) -> str:
    for ids in ([5, 7, 7, 2, 9], [3], []):
        right = [*ids[1:], -100] if ids else []
        got = answer(list(ids))
        if got == right:
            continue
        what = f"got {got} for {ids}"
        if not ids:
            raise NotYet(what, "a row without pieces has no labels either", "treat the empty row on its own")
        if got == ids:
            raise NotYet(what, "that asks for the same piece again, as in section 7", "labels[0] is ids[1]")
        if len(got) != len(ids):
            raise NotYet(what, "there must be one label for each piece", "fill the end with -100")
        if got[1:] == ids[:-1]:
            raise NotYet(what, "those are the pieces that came before", "labels[0] is ids[1]")
        if got[:-1] == right[:-1]:
            raise NotYet(what, "nothing follows the last piece: no target there", "the last label is -100")
        raise NotYet(
            what, "go through the list by hand: what follows the first piece?", "labels[0] is ids[1]"
        )
    return "long, short and empty rows"


@exercise("0.1.2", "share the batch", returns=list)
def rows_of_rank(answer: Answer) -> str:
    for rows, ranks in ((16, 4), (22, 3), (7, 4), (2, 4)):
        shares = [list(answer(rows, rank, ranks)) for rank in range(ranks)]
        read = Counter(row for share in shares for row in share)
        what = f"{rows} rows on {ranks} ranks: {shares}"
        outside = sorted(row for row in read if not 0 <= row < rows)
        if outside:
            raise NotYet(what, f"there are no rows {outside}", "rows count from 0 to rows - 1")
        twice = sorted(row for row, times in read.items() if times > 1)
        if twice:
            raise NotYet(
                what,
                f"rows {twice} are read more than once",
                "the answer must depend on the rank",
                "rank, rank + ranks, …",
            )
        missing = sorted(set(range(rows)) - set(read))
        if missing:
            raise NotYet(
                what, f"rows {missing} are never read", "what becomes of the remainder of rows / ranks?"
            )
        sizes = [len(share) for share in shares]
        if max(sizes) - min(sizes) > 1:
            raise NotYet(
                what,
                f"a rank has at least two rows more than another: {sizes}",
                "deal the rows out like cards",
            )
    return "each row once, on 3 and 4 ranks"


@exercise("0.1.3", "the k likeliest")
def top_k_probabilities(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(3)
    for size, k, temperature in ((50, 5, 1.0), (50, 5, 0.4), (50, 7, 2.5), (50, 1, 1.0)):
        logits = torch.randn(size, generator=generator) * 2
        top = (logits / temperature).topk(k)
        right = torch.zeros(size).scatter(0, top.indices, top.values.softmax(0))
        got = answer(logits.clone(), k, temperature)
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {type(got).__name__} {list(getattr(got, 'shape', []))}",
                f"return a tensor of the shape of the logits, [{size}]",
            )
        if (got > 0).sum() > k:
            raise NotYet(
                f"{int((got > 0).sum())} pieces can be drawn, k is {k}",
                "more than k pieces have a chance",
                "find the k largest with topk, and leave 0 elsewhere",
            )
        if abs(got.sum().item() - 1) > 1e-4:
            raise NotYet(
                f"the probabilities add up to {got.sum():.2f}",
                "after the cut they must add up to 1 again",
                "softmax after the cut, not before",
            )
        if not torch.allclose(got, right, atol=1e-5):
            raise NotYet(
                f"wrong for k = {k}, temperature {temperature}",
                "what does the temperature divide?",
                "logits / temperature first, then topk, then softmax over these k",
            )
    return "four settings of k and temperature"
