"""Checkers of notebook 1.2."""

import weakref
from collections.abc import Iterator
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.2.1", "a window, with a cache")
def visible(answer: Answer) -> str:
    import torch

    shapes = ((1, 6, 4), (2, 7, 3), (5, 5, 3), (4, 9, 20))
    for queries, keys, window in shapes:
        position = torch.arange(keys - queries, keys)[:, None]
        distance = position - torch.arange(keys)
        right = (distance >= 0) & (distance < window)
        got = answer(queries, keys, window)
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {list(getattr(got, 'shape', []))}", f"the mask is [queries, keys] = {[queries, keys]}"
            )
        if got.dtype != torch.bool:
            raise NotYet(f"got {got.dtype}", "the mask holds booleans: True where the query may look")
        if torch.equal(got, right):
            continue
        count = int(got.sum())
        seen = f"{count} pair{'' if count == 1 else 's'}, not {int(right.sum())}"
        what = f"{seen}, for {queries} queries, {keys} keys, a window of {window}"
        start = torch.arange(queries)[:, None] - torch.arange(keys)
        if torch.equal(got, (start >= 0) & (start < window)):
            raise NotYet(
                what,
                "the queries are the last tokens: align them at the END of the keys",
                "query i is at position i + keys - queries",
            )
        if torch.equal(got, distance.abs() < window):
            raise NotYet(what, "a query also sees keys after it", "distance = query - key must be at least 0")
        if torch.equal(got, (distance >= 0) & (distance <= window)):
            raise NotYet(
                what, "a key too many: its own position counts as one of the window", "distance < window"
            )
        if torch.equal(got, distance >= 0):
            raise NotYet(what, "causal and aligned; the window is missing", "distance < window")
        raise NotYet(what, "draw it for 2 queries and 7 keys", "(0 <= distance) & (distance < window)")
    return f"{len(shapes)} shapes, with and without a cache"


class _Tiles:
    """Tiles that are made when they are asked for, once; `held` is the most that were alive together."""

    def __init__(self, scores: Any, values: Any, size: int) -> None:
        self.scores, self.values, self.size = scores, values, size
        self.held = self.rounds = 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.rounds += 1
        made: list[weakref.ref[Any]] = []

        def tile(start: int) -> tuple[Any, Any]:
            columns = slice(start, start + self.size)
            pair = self.scores[:, columns].clone(), self.values[columns].clone()
            made.append(weakref.ref(pair[0]))
            return pair

        for start in range(0, self.scores.shape[1], self.size):
            yield tile(start)
            self.held = max(self.held, sum(ref() is not None for ref in made))


@exercise("1.2.2", "the online softmax")
def mix(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(7)
    cases = ((3, 12, 3, 1.0), (2, 20, 4, 300.0), (4, 7, 1, 2.0), (2, 18, 2, 5.0))
    for queries, keys, size, spread in cases:
        scores = spread * torch.randn(queries, keys, generator=generator)
        values = torch.randn(keys, 5, generator=generator)
        right = scores.softmax(-1) @ values
        tiles = _Tiles(scores, values, size)
        got = answer(tiles)
        what = f"wrong for {keys} keys in tiles of {size}, scores up to {scores.abs().max():.0f}"
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {list(getattr(got, 'shape', []))}", f"the result is [q, k] = {list(right.shape)}"
            )
        if tiles.rounds > 1:
            raise NotYet(
                "the tiles were walked over twice", "one pass is enough: correct the old sums as you go"
            )
        if tiles.held > 2:
            raise NotYet(
                f"{tiles.held} tiles were alive together",
                "take one tile at a time: keep sums, not tiles",
                "a largest score, a sum of weights and a mixture for each query are all you need",
            )
        if torch.allclose(got, right, atol=1e-5):
            continue
        if not got.isfinite().all():
            raise NotYet(
                what + ": not a number",
                "exp overflows: subtract the largest score of the row first",
                "keep the largest score so far; weights are exp(score - largest)",
            )
        _explain_mixture(got, scores, values, size, what)
    return f"{len(cases)} rows of tiles, scores up to 1,000, one tile at a time"


def _explain_mixture(got: Any, scores: Any, values: Any, size: int, what: str) -> None:
    import torch

    pairs = list(zip(scores.split(size, 1), values.split(size), strict=True))
    shifted = [((s - s.amax(-1, keepdim=True)).exp(), v) for s, v in pairs]
    own = sum(w @ v for w, v in shifted) / sum(w.sum(-1, keepdim=True) for w, _ in shifted)
    if torch.allclose(got, own, atol=1e-5):
        raise NotYet(
            what,
            "sums made with the old largest score do not add to those made with a new one: scale them",
            "multiply the old sums by exp(old largest - new largest)",
        )
    mean = torch.stack([s.softmax(-1) @ v for s, v in pairs]).mean(0)
    if torch.allclose(got, mean, atol=1e-5):
        raise NotYet(
            what,
            "each tile has a softmax of its own here; the weights must add up to 1 over ALL tiles",
            "add up weights and mixtures; divide at the end",
        )
    largest = scores.amax(-1, keepdim=True)
    if torch.allclose(got, (scores - largest).exp() @ values, atol=1e-5):
        raise NotYet(what, "the mixture is not normalised: divide once, at the end, by the sum of weights")
    raise NotYet(what, "try two tiles by hand", "larger = max(best, new); shrink = exp(best - larger)")


@exercise("1.2.3", "cut a fused projection of grouped heads", returns=tuple)
def split_qkv(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(3)
    cases = ((4, 2, 16), (6, 2, 4), (4, 1, 8), (3, 3, 4))
    for heads, kv_heads, k in cases:
        fused = torch.randn(2, 5, (heads + 2 * kv_heads) * k, generator=generator)
        query, key, value = (
            part.unflatten(-1, (-1, k)).transpose(1, 2)
            for part in fused.split([heads * k, kv_heads * k, kv_heads * k], -1)
        )
        shared = heads // kv_heads
        right = (query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))
        got = answer(fused.clone(), heads, kv_heads)
        what = f"wrong for {heads} query heads, {kv_heads} key/value heads of {k}"
        if len(got) != 3 or not all(isinstance(part, torch.Tensor) for part in got):
            raise NotYet(f"got {len(got)} parts", "the result is the tuple query, key, value")
        shapes = [list(part.shape) for part in got]
        if shapes[0] != list(query.shape):
            raise NotYet(
                f"the query is {shapes[0]}, not {list(query.shape)}",
                "the three parts have different widths: never cut into equal thirds",
                f"here {heads * k}, {kv_heads * k} and {kv_heads * k}",
            )
        if shapes[1] == list(key.shape) != shapes[0]:
            raise NotYet(
                f"the key is {shapes[1]}",
                "repeat keys and values until a query head has its own",
                "repeat_interleave",
            )
        if all(torch.equal(ours, theirs) for ours, theirs in zip(got, right, strict=True)):
            continue
        if torch.equal(got[1], key.repeat(1, shared, 1, 1)):
            raise NotYet(
                what,
                "the first query heads must SHARE the first key head: 0 0 1 1, not 0 1 0 1",
                "repeat_interleave",
            )
        if torch.equal(got[0], right[0]) and torch.equal(got[1], right[2]):
            raise NotYet(what, "keys and values are swapped", "queries, keys, values: in this order")
        raise NotYet(
            what, "the numbers of a head stand together, head by head", "view(b, l, -1, k), then transpose"
        )
    return f"{len(cases)} shapes, among them widths 64, 32, 32"
