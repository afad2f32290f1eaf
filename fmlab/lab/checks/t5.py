"""Checkers of notebook 3.5."""

from typing import cast

import torch

from fmlab.lab.exercises import Answer, NotYet, exercise
from fmlab.models import T5, T5Config
from fmlab.models.attention.t5_buckets import relative_buckets
from fmlab.models.state import Block
from fmlab.parallel.pipeline.stages import crossing


@exercise("3.5.1", "a rank's share of the relative bias", returns=torch.Tensor)
def own_bias(answer: Answer) -> str:
    cases = [(8, 4, 2, 5, 5), (8, 6, 3, 3, 7), (4, 2, 1, 4, 4)]
    for rows, heads, ranks, queries, keys in cases:
        table = torch.arange(rows * heads, dtype=torch.float64).view(rows, heads)
        buckets = relative_buckets(queries, keys, True, rows, 8)
        everything = table[buckets].permute(2, 0, 1)[None]
        for rank in range(ranks):
            right = everything.chunk(ranks, 1)[rank]
            got = answer(table.clone(), buckets.clone(), rank, ranks)
            what = f"wrong for {heads} heads on rank {rank} of {ranks}"
            if got.shape != right.shape:
                raise NotYet(
                    f"got the shape {list(got.shape)} for {heads} heads on {ranks} ranks",
                    f"return [1, heads of the rank, q, s], here {list(right.shape)}",
                    "table[buckets] is [q, s, heads]: permute it",
                )
            if torch.equal(got, right):
                continue
            if torch.equal(got, everything.chunk(ranks, 1)[0]):
                raise NotYet(what, "these are the heads of rank 0: which columns are this rank's?")
            if torch.equal(got, everything[:, rank::ranks]):
                raise NotYet(what, "a rank's heads stand side by side, as in the query-key-value matrix")
            raise NotYet(what, "cut the table's columns, then look the buckets up", "table[:, first : last]")
    return "three tables on one, two and three ranks"


@exercise("3.5.2", "the whole gradient of a table", returns=torch.Tensor)
def whole_gradient(answer: Answer) -> str:
    generator = torch.Generator().manual_seed(0)
    for ranks in (2, 3):
        whole = torch.randn(4, 2 * ranks, generator=generator, dtype=torch.float64)
        columns = list(whole.chunk(ranks, 1))
        own = [torch.zeros_like(whole) for _ in range(ranks)]
        for r, piece in enumerate(own):
            piece[:, 2 * r : 2 * r + 2] = columns[r]
        cases = {"divided": columns, "partial": own, "same": [whole.clone() for _ in range(ranks)]}
        for kind, pieces in cases.items():
            got = answer(kind, [piece.clone() for piece in pieces])
            what = f'wrong for "{kind}" on {ranks} ranks'
            if kind == "divided" and got.shape != whole.shape:
                raise NotYet(
                    f"got the shape {list(got.shape)}, the table is {list(whole.shape)}",
                    "a column is a head: the pieces stand side by side",
                )
            if torch.allclose(got, whole):
                continue
            if torch.allclose(got, whole * ranks):
                raise NotYet(what, f"{ranks} times too large: every rank had the whole gradient already")
            if torch.allclose(got * ranks, whole):
                raise NotYet(what, f"{ranks} times too small: summands are added, not averaged")
            if torch.allclose(got, pieces[0]):
                raise NotYet(what, "rank 0 knows only what its own heads ask for")
            raise NotYet(what, "side by side if divided, the sum if partial, any one if the same")
    return "three kinds on two and three ranks"


@exercise("3.5.3", "what crosses a cut of an encoder-decoder", returns=int)
def crossing_bytes(answer: Answer) -> str:
    encoder, decoder, b, n, t, d, h = 3, 2, 5, 16, 6, 8, 2
    with torch.device("meta"):
        model = T5(T5Config(32, encoder, d, h, 4, 16, num_decoder_layers=decoder))
    sizes = {"encoder_hidden": b * n * d, "hidden": b * t * d}
    sizes |= {"encoder_bias": h * n * n, "decoder_bias": h * t * t}
    blocks = cast(list[Block], list(model.blocks))
    for cut in range(1, len(blocks)):
        names = [name for name in crossing(blocks, cut) if name in sizes]
        right = 4 * sum(sizes[name] for name in names)
        got = answer(cut, encoder, decoder, b, n, t, d, h)
        if got == right:
            continue
        what = f"got {got} bytes before block {cut} of {len(blocks)}, expected {right}"
        for name, size in sizes.items():
            if name in names and got == right - 4 * size:
                raise NotYet(what, f"{name} is missing: some later block reads it")
            if name not in names and got == right + 4 * size:
                raise NotYet(what, f"{name} is not needed here: no later block reads it, or none made it yet")
        if got * 4 == right:
            raise NotYet(what, "an fp32 number has four bytes")
        raise NotYet(what, "which of the four tensors exist already, and are read by a later block?")
    return "every cut of an encoder-decoder"
