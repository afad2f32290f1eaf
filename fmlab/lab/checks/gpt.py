"""Checkers of notebook 1.3."""

from fmlab.lab.exercises import Answer, NotYet, exercise

SHAPES = ((12, 768, 50257, 1024), (3, 40, 101, 17), (1, 8, 5, 3))


@exercise("1.3.1", "count it without building it", returns=int)
def count_parameters(answer: Answer) -> str:
    from fmlab.models import GPT, GPTConfig

    for layers, width, vocab, positions in SHAPES:
        import torch

        with torch.device("meta"):
            right = GPT(GPTConfig(vocab, positions, layers, width, num_heads=1)).num_parameters()
        got = answer(layers, width, vocab, positions)
        off = got - right
        what = f"got {got:,}, off by {off:+,}, for {layers} layers of width {width}"
        if off == 0:
            continue
        if off == vocab * width:
            raise NotYet(
                what, "the head is the embedding: do not count its matrix again", "vocab · width once"
            )
        if off == -positions * width:
            raise NotYet(what, "the positions have an embedding too", "positions · width")
        if off == -2 * width:
            raise NotYet(what, "one more norm stands at the end", "a norm has a scale and a shift: 2 · width")
        if -off <= layers * 13 * width + 2 * width and off < 0:
            raise NotYet(
                what,
                "do you count biases and norms? They grow with width, not its square",
                "13 · width a layer: 3 + 1 + 4 + 1 in biases, 4 in two norms",
            )
        raise NotYet(what, "add up one layer by hand: attention, MLP, two norms", "12·d² + 13·d a layer")
    return f"{len(SHAPES)} shapes, exact"


@exercise("1.3.2", "model FLOPs of training, for one token", returns=(int, float))
def training_flops(answer: Answer) -> str:
    for layers, width, vocab, length in ((12, 768, 50257, 1024), (3, 40, 101, 17), (96, 12288, 50257, 2048)):
        head, scores = vocab * width, layers * width * length
        right = 6 * (12 * layers * width**2 + head) + 12 * scores
        got = answer(layers, width, vocab, length)
        off = got - right
        if off == 0:
            continue
        what = f"got {got:,}, {got / right:.3f} of the right number, for width {width}, length {length}"
        if got * 3 == right:
            raise NotYet(
                what, "that is the forward pass: where is the backward pass?", "it costs twice as much"
            )
        if off == -12 * scores:
            raise NotYet(
                what,
                "the scores are missing: each token meets all others, twice",
                "12 · layers · width · length",
            )
        if off == -6 * head:
            raise NotYet(
                what, "the head is a matrix product too, though it owns no weights", "6 · vocab · width"
            )
        if off == 6 * head:
            raise NotYet(what, "looking up an embedding is no product: it is free", "vocab · width once")
        if off == 2 * scores:
            raise NotYet(
                what, "model FLOPs leave out what a fused kernel computes again", "12, not 14, a score"
            )
        raise NotYet(what, "6 a weight of each matrix, and attention", "6·(12·L·d² + V·d) + 12·L·d·l")
    return "three shapes, exact"


@exercise("1.3.3", "one piece against the cache")
def attend(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(5)
    for heads, cached, width in ((2, 5, 16), (3, 1, 8), (4, 9, 32)):
        query = torch.randn(heads, width, generator=generator) * 2
        keys, values = (torch.randn(heads, cached, width, generator=generator) for _ in range(2))
        right = torch.nn.functional.scaled_dot_product_attention(query[:, None], keys, values)[:, 0]
        got = answer(query.clone(), keys.clone(), values.clone())
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {list(getattr(got, 'shape', []))}", f"the result is [h, k] = {list(right.shape)}"
            )
        if torch.allclose(got, right, atol=1e-5):
            continue
        what = f"differs by {(got - right).abs().max():.2g} for {cached} cached pieces"
        scores = torch.einsum("hk,htk->ht", query, keys)
        if torch.allclose(
            got, torch.einsum("ht,htk->hk", (scores / width**0.5).softmax(0), values), atol=1e-5
        ):
            raise NotYet(
                what, "the chances must add up to 1 over the cached pieces", "softmax over dimension t"
            )
        if torch.allclose(got, torch.einsum("ht,htk->hk", scores / width**0.5, values), atol=1e-5):
            raise NotYet(what, "scores are no chances yet: a softmax is missing")
        for wrong in (scores, scores / width):
            if torch.allclose(got, torch.einsum("ht,htk->hk", wrong.softmax(-1), values), atol=1e-5):
                raise NotYet(what, "what divides the scores? The square root of the head's width", "k ** 0.5")
        raise NotYet(what, "scores, divided; softmax; then mix the values", "two einsums and a softmax")
    return "1 to 9 cached pieces"
