# Plausible wrong answers to the exercises of 1.12_front_ends.py, each with the hint that it must earn.


# %% exercise="1.12.1" hint="each device has a summand"
def propagate(x: str, w: str) -> str:
    rules = {
        ("whole", "whole"): "whole",
        ("rows", "whole"): "rows",
        ("whole", "columns"): "columns",
    }
    rules["columns", "rows"] = "whole"
    return rules.get((x, w), "must move")


# %% exercise="1.12.1" hint="a device would hold one block only"
def propagate(x: str, w: str) -> str:
    if x == "columns" and w == "rows":
        return "partial"
    if x == "rows" and w != "rows":
        return "rows"
    return w if x == "whole" and w != "rows" else "must move"


# %% exercise="1.12.1" hint="k must be divided in both"
def propagate(x: str, w: str) -> str:
    if "whole" in (x, w):
        return x if w == "whole" else w
    return "partial" if (x, w) == ("columns", "rows") else "must move"


# %% exercise="1.12.2" hint="a Python branch asks for data"
def safe_root(x: torch.Tensor) -> torch.Tensor:
    return (
        x.sqrt() if bool((x > 0).all()) else torch.where(x > 0, x.clamp(min=1e-30).sqrt(), 0.0)
    )


# %% exercise="1.12.2" hint="zero times infinity"
def safe_root(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x.sqrt(), 0.0)


# %% exercise="1.12.2" hint="zero times infinity"
def safe_root(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0).sqrt()


# %% exercise="1.12.2" hint="give the exact values"
def safe_root(x: torch.Tensor) -> torch.Tensor:
    return (x.clamp(min=0) + 1e-6).sqrt()


# %% exercise="1.12.2" hint="a shape that depends on data"
def safe_root(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    return out.masked_scatter(x > 0, x[x > 0].sqrt())


# %% exercise="1.12.3" hint="weigh each mean by its rows"
def whole_mean(means: list[float], rows: list[int]) -> float:
    return sum(m for m, r in zip(means, rows) if r) / max(1, sum(r > 0 for r in rows))


# %% exercise="1.12.3" hint="NaN times 0 is NaN"
def whole_mean(means: list[float], rows: list[int]) -> float:
    return sum(m * r for m, r in zip(means, rows)) / max(1, sum(rows))


# %% exercise="1.12.3" hint="no rows at all"
def whole_mean(means: list[float], rows: list[int]) -> float:
    return sum(m * r for m, r in zip(means, rows) if r) / sum(rows)
