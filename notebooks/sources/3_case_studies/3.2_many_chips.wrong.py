# Plausible wrong answers to the exercises of 3.2_many_chips.py, each with the hint that it must earn.


# %% exercise="3.2.1" hint="the last batch may have fewer rows"
def compilations(lengths: list[int], batch_size: int, buckets: list[int]) -> int:
    shapes = set()
    for start in range(0, len(lengths), batch_size):
        longest = max(lengths[start : start + batch_size])
        shapes.add(next(bucket for bucket in buckets if bucket >= longest))
    return len(shapes)


# %% exercise="3.2.1" hint="a shape that came before is not compiled again"
def compilations(lengths: list[int], batch_size: int, buckets: list[int]) -> int:
    return -(-len(lengths) // batch_size)


# %% exercise="3.2.1" hint="round the longest sentence up to a bucket"
def compilations(lengths: list[int], batch_size: int, buckets: list[int]) -> int:
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return len({(len(batch), max(batch)) for batch in batches})


# %% exercise="3.2.1" hint="the last batch is not dropped"
def compilations(lengths: list[int], batch_size: int, buckets: list[int]) -> int:
    shapes = set()
    for start in range(0, len(lengths) - batch_size + 1, batch_size):
        longest = max(lengths[start : start + batch_size])
        shapes.add(next(bucket for bucket in buckets if bucket >= longest))
    return len(shapes)


# %% exercise="3.2.2" hint="the host read a number"
def clip(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    if norm > limit:
        return [gradient * (limit / norm) for gradient in gradients]
    return gradients


# %% exercise="3.2.2" hint="small gradients must stay as they are"
def clip(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (limit / norm) for gradient in gradients]


# %% exercise="3.2.2" hint="one norm over all gradients"
def clip(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    return [g * torch.clamp(limit / (g.norm() + 1e-6), max=1.0) for g in gradients]


# %% exercise="3.2.2" hint="the direction changed"
def clip(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    return [gradient.clamp(-limit, limit) for gradient in gradients]


# %% exercise="3.2.3" hint="look at the cosine"
def diagnose(report: dict[str, tuple[float, float, float]]) -> str:
    off = {n for n, (a, b, c) in report.items() if abs(b / a - 1) > 1e-4}
    if not off:
        return "sound"
    return "untied" if off == {"embed"} else "scaled"


# %% exercise="3.2.3" hint="only one parameter differs"
def diagnose(report: dict[str, tuple[float, float, float]]) -> str:
    off = [(b / a, c) for a, b, c in report.values() if abs(b / a - 1) > 1e-4 or c < 1 - 1e-4]
    if not off:
        return "sound"
    return "scaled" if all(cosine > 1 - 1e-4 for _, cosine in off) else "rounding"


# %% exercise="3.2.3" hint="nothing differs"
def diagnose(report: dict[str, tuple[float, float, float]]) -> str:
    off = {n for n, (a, b, c) in report.items() if a != b or c != 1}
    if off == {"embed"}:
        return "untied"
    return "scaled" if all(c == 1 for _, _, c in report.values()) else "rounding"
