"""Exercises of 1.14, kernels."""

from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.14.1", "a kernel within a byte budget")
def product(answer: Answer) -> str:
    import torch

    from fmlab.kernels.tiles import run

    def kernel(nc: Any, at: Any, b: Any) -> Any:
        return answer(nc, at, b)

    shapes = [(256, 300, 700), (128, 384, 512), (200, 256, 1100)]  # k, m, n
    for k, m, n in shapes:
        random = torch.Generator().manual_seed(k)
        at, b = (torch.randn(k, size, generator=random).bfloat16() for size in (m, n))
        exact = at.double().T @ b.double()
        what = f"for A [{m}, {k}] and B [{k}, {n}]"
        try:
            done = run(kernel, at, b)
        except NotYet:
            raise
        except ValueError as error:
            raise NotYet(
                f"{what}: {error}", "the last tile may be shorter than the others: take `pieces`"
            ) from None
        if done.output.shape != exact.shape:
            raise NotYet(f"C is {list(done.output.shape)} {what}", "C is [m, n]")
        off = float((done.output - exact).norm() / exact.norm())
        if off > 1e-2:
            raise NotYet(
                f"C is off by {off:.0%} {what}",
                "along k, each product must be added to the sums of those before it: accumulate=True",
                "the first product of a tile starts the sum, accumulate=False; the others add",
            )
        _within_budget(done, {"A": at, "B": b}, what)
    return f"{len(shapes)} shapes, every element once"


def _within_budget(done: Any, inputs: dict[str, Any], what: str) -> None:
    for place, (name, tensor) in enumerate(inputs.items()):
        loaded = sum(
            one.nbytes for one in done.instructions
            if one.engine == "load" and one.about.startswith(f"input {place} ")
        )  # fmt: skip
        times = loaded / tensor.nbytes
        if times > 1:
            of = {"A": "column", "B": "row"}[name]
            raise NotYet(
                f"{name} crossed the bus {times:.3g} times {what}",
                f"{name} is loaded once for each {of} of tiles: load it outside that loop and keep it",
                "keep a list of tiles; a tile stays in SBUF as long as you hold it",
            )
    if done.hbm_written > done.output.nbytes:
        raise NotYet(
            f"{done.hbm_written:,} bytes were stored {what}", "store each tile of C once, when it is done"
        )


@exercise("1.14.2", "merge two partial softmaxes", returns=tuple)
def merge(answer: Answer) -> str:
    import torch

    random = torch.Generator().manual_seed(2)
    scores, values = torch.randn(6, 40, generator=random), torch.randn(40, 5, generator=random)
    scores[1] *= 2000  # exp of these is no number
    scores[2, :15] = -torch.inf  # saw nothing of the first set
    scores[3, 15:] = -torch.inf  # nothing of the second
    scores[4] = -torch.inf  # nothing at all
    scores[5, :15] += 9  # the first set weighs nearly all

    def part(keys: slice) -> tuple[Any, Any]:
        weights = scores[:, keys].softmax(-1).nan_to_num(0.0)
        return weights @ values[keys], scores[:, keys].logsumexp(-1)

    first, second, both = part(slice(0, 15)), part(slice(15, 40)), part(slice(0, 40))
    got = answer(*(x.clone() for x in (*first, *second)))
    if len(got) != 2 or got[0].shape != (6, 5) or got[1].shape != (6,):
        raise NotYet(
            "the answer is not (out [n, d], logsumexp [n])",
            "return a pair: the mixture, and one number a query",
        )
    out, logsumexp = got
    plain = out[0], both[0][0]
    if not torch.allclose(*plain, atol=1e-4):
        if torch.allclose(out[0], (first[0][0] + second[0][0]) / 2, atol=1e-5):
            raise NotYet(
                "out is the mean of both",
                "that is as if both sets weighed the same; how much has each of the sum?",
            )
        raise NotYet(
            f"out[0, 0] is {out[0, 0]:.4f}, not {both[0][0, 0]:.4f}",
            "the two parts must have weights that add up to 1",
            "a set's weight is exp(its log-sum-exp - that of both)",
        )
    if not torch.isfinite(out[1]).all() or not torch.allclose(out[1], both[0][1], atol=1e-3):
        raise NotYet(
            "out is wrong where scores are in the thousands",
            "exp of a score in the thousands is inf: take only differences",
        )
    if torch.isnan(out[4]).any():
        raise NotYet(
            "out is nan for a query that saw no key at all",
            "of a query that saw no key at all, -inf - -inf is nan; the answer is 0",
        )
    if not torch.allclose(out, both[0], atol=1e-3):
        raise NotYet("out is wrong where one set was not seen", "a set of log-sum-exp -inf weighs 0")
    if not torch.allclose(logsumexp, both[1], atol=1e-3):
        raise NotYet(
            f"logsumexp[0] is {logsumexp[0]:.4f}, not {both[1][0]:.4f}",
            "return the log-sum-exp of both sets: the next set is merged with it",
            "torch.logaddexp",
        )
    return "large scores, unseen sets, unseen queries"


@exercise("1.14.3", "the tile that fits", returns=tuple)
def best_tile(answer: Answer) -> str:
    from fmlab.kernels.triton.traffic import matmul_bytes

    sides = [2**power for power in range(4, 11)]

    def size(tile: tuple[int, int], itemsize: int) -> int:
        return 32 * sum(tile) * itemsize + 4 * tile[0] * tile[1]

    cases = [(4096, 4096, 100_000, 2), (64, 8192, 200_000, 2), (100, 100, 10**6, 4), (2048, 96, 30_000, 4)]
    for m, n, memory, itemsize in cases:
        tiles = [(tm, tn) for tm in sides for tn in sides if size((tm, tn), itemsize) <= memory]
        moved = {tile: matmul_bytes(m, n, 1, *tile, itemsize).total for tile in tiles}
        right = min(tiles, key=lambda tile: (moved[tile], tile[0] * tile[1], tile[0]))
        got = answer(m, n, memory, itemsize)
        what = f"got {got}, not {right}, for m={m}, n={n}, {memory:,} bytes, {itemsize} bytes a number"
        if got == right:
            continue
        if got not in moved:
            if len(got) == 2 and all(side in sides for side in got):
                raise NotYet(
                    what, f"that tile does not fit: it takes {size(got, itemsize):,} bytes with its sums"
                )
            raise NotYet(what, "two sides, each a power of two from 16 to 1024")
        if moved[got] == moved[right]:
            raise NotYet(
                what,
                "of tiles that move equally few bytes, take the one with the fewest sums",
                "then the one with the smaller tile_m",
            )
        if got[0] == got[1]:
            raise NotYet(
                what, "a tile need not be square, where m and n differ or memory allows one more doubling"
            )
        raise NotYet(
            what,
            "that moves more bytes than needed: A is loaded ceil(n / tile_n) times, B ceil(m / tile_m) times",
        )
    return f"{len(cases)} shapes, judged against every tile"
