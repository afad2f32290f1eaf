# Plausible wrong answers to the exercises of 3.2_many_chips.py, each with the hint that it must earn.


# %% exercise="3.2.1" hint="has another direction on each device"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    return [n for n, g in cpu.items() if not (chip[n] - g).norm() / g.norm() <= tolerance]


# %% exercise="3.2.1" hint="norms alone do not see a direction"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    norms = {n: (g.norm(), chip[n].norm()) for n, g in cpu.items()}
    floor = 1e-6 * torch.stack([a for a, _ in norms.values()]).norm()
    off = {n: abs(a - b) / max(a, floor) for n, (a, b) in norms.items()}
    return [n for n in off if not off[n] <= tolerance]


# %% exercise="3.2.1" hint="a small gradient may differ by much of itself"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    total = torch.stack([g.norm() for g in cpu.values()]).norm()
    return [n for n, g in cpu.items() if not (chip[n] - g).norm() / total <= tolerance]


# %% exercise="3.2.1" hint="a small gradient may differ by much of itself"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    return [n for n, g in cpu.items() if not torch.allclose(chip[n], g, rtol=0, atol=tolerance)]


# %% exercise="3.2.1" hint="NaN is neither larger nor smaller"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    floor = 1e-6 * torch.stack([g.norm() for g in cpu.values()]).norm()
    off = {n: (chip[n] - g).norm() / max(g.norm(), floor) for n, g in cpu.items()}
    return [n for n in off if off[n] > tolerance]


# %% exercise="3.2.1" hint="what is tiny on the CPU may be large on the chip"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    floor = 1e-6 * torch.stack([g.norm() for g in cpu.values()]).norm()
    real = {n: g for n, g in cpu.items() if g.norm() >= floor}
    return [n for n, g in real.items() if not (chip[n] - g).norm() / g.norm() <= tolerance]


# %% exercise="3.2.1" hint="more than one may differ"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    floor = 1e-6 * torch.stack([g.norm() for g in cpu.values()]).norm()
    off = {
        n: ((chip[n] - g).norm() / max(g.norm(), floor)).nan_to_num(1e9) for n, g in cpu.items()
    }
    worst = max(off, key=off.get)
    return [worst] if off[worst] > tolerance else []


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
