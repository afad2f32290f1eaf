"""Checkers of notebook 1.5."""

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.5.1", "cut images into patches")
def cut(answer: Answer) -> str:
    import torch

    for b, c, h, w, patch in ((2, 3, 8, 12, 4), (1, 2, 6, 4, 2), (3, 1, 5, 5, 5)):
        images = torch.arange(float(b * c * h * w)).view(b, c, h, w)
        right = torch.nn.functional.unfold(images, patch, stride=patch).mT
        got = answer(images.clone(), patch)
        what = f"wrong for images [{b}, {c}, {h}, {w}] in patches of {patch}"
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got shape {list(getattr(got, 'shape', []))}", f"[b, n, c·p·p] is {list(right.shape)}"
            )
        if torch.equal(got, right):
            continue
        if torch.equal(got, images.reshape(right.shape)):
            raise NotYet(
                what,
                "a reshape alone cuts rows of pixels, not squares",
                "split height and width in two each, then permute",
            )
        if torch.equal(got.sort(-1).values, right.sort(-1).values):
            raise NotYet(
                what,
                "the right pixels: look again at what stands where in one patch",
                "channel, then row, then column",
            )
        if torch.equal(*(x.flatten(1).sort(-1).values for x in (got, right))) and h != patch:
            raise NotYet(
                what,
                "the right patches in another order: left to right first, then down",
                "rows before columns",
            )
        raise NotYet(what, "view as [b, c, rows, p, columns, p]; which order do you want?")
    try:
        answer.fn(torch.zeros(1, 3, 8, 9), 4)
    except ValueError:
        return "three shapes, and a patch that does not fit is refused"
    raise NotYet(
        "8 x 9 pixels in patches of 4 went through",
        "a column of pixels is never seen: refuse a patch that does not divide both sides",
    )


@exercise("1.5.2", "the contrastive loss by hand")
def contrastive_loss(answer: Answer) -> str:
    import torch
    from torch.nn.functional import cross_entropy, normalize

    generator = torch.Generator().manual_seed(11)
    for pairs, width, scale in ((5, 7, 3.0), (2, 4, 20.0), (16, 8, 1.0)):
        images, texts = (3 * torch.randn(pairs, width, generator=generator) for _ in range(2))
        target = torch.arange(pairs)

        def loss(logits: "torch.Tensor", target: "torch.Tensor" = target) -> float:
            return (cross_entropy(logits, target) + cross_entropy(logits.T, target)).item() / 2

        products = normalize(images, dim=-1) @ normalize(texts, dim=-1).T
        right = loss(scale * products)
        one_way = [cross_entropy(x, target).item() for x in (scale * products, scale * products.T)]
        got = float(answer(images.clone(), texts.clone(), scale))

        def is_(value: float, got: float = got) -> bool:
            return abs(got - value) < 1e-4 * max(1.0, abs(value))

        if is_(right):
            continue
        what = f"got {got:.4f}, right is {right:.4f}, for {pairs} pairs and scale {scale:g}"
        if any(map(is_, one_way)):
            raise NotYet(what, "and the other direction? Each text must find its image too", "logits.T")
        if is_(2 * right):
            raise NotYet(what, "it is the average of both directions, not their sum", "divide by 2")
        if is_(right * pairs) or is_(2 * right * pairs):
            raise NotYet(what, "it is a mean over the pairs, not a sum")
        if is_(loss(scale * images @ texts.T)):
            raise NotYet(what, "make the vectors of length 1 first", "divide by the norm over the last dim")
        if is_(loss(products / scale)) or is_(loss(products)):
            raise NotYet(what, "the scale multiplies the products", "scale = 1 / temperature")
        raise NotYet(
            what, "unit vectors, products, scale, cross-entropy both ways", "the right text is number i"
        )
    return "3 batches, exact to 1e-4"


@exercise("1.5.3", "the way back through a gather")
def gather_backward(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(12)
    for sizes in ([2, 3], [4, 1, 2], [3, 3, 3, 3]):
        total = sum(sizes)
        gradients = [torch.randn(total, 3, generator=generator) for _ in sizes]
        for rank, size in enumerate(sizes):
            first = sum(sizes[:rank])
            mine = slice(first, first + size)
            right = torch.stack(gradients).sum(0)[mine]
            got = answer([g.clone() for g in gradients], list(sizes), rank)
            what = f"wrong for rank {rank} of ranks with {sizes} rows"
            if not isinstance(got, torch.Tensor):
                raise NotYet(f"got {type(got).__name__}", f"a tensor {list(right.shape)} is needed")
            if got.shape == right.shape and torch.allclose(got, right, atol=1e-5):
                continue
            if got.shape == right.shape and torch.allclose(got, gradients[rank][mine], atol=1e-5):
                raise NotYet(
                    what, "and what the others make of your rows? Their losses count too", "add up all ranks"
                )
            if got.shape == right.shape and torch.allclose(got * len(sizes), right, atol=1e-5):
                raise NotYet(what, "the whole is a sum of losses, so gradients add up", "no division")
            if got.shape != right.shape or rank:
                raise NotYet(
                    what,
                    "look at where your rows begin: after those of all ranks before you",
                    "sum(sizes[:rank])",
                )
            raise NotYet(what, "add up what all ranks have for the rows, then keep yours")
    return "2 to 4 ranks, uneven rows"
