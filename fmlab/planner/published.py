"""The published record: training runs that others measured and printed, each with its source and its doubts.

    runs()                                        every row
    runs(group="Megatron SC21 Table 1")           those of one publication
    runs(fully_specified=True)                    those whose model, chips, layout and result are all known
    runs(path="others.csv")                       another file with the same columns
    run.step_seconds(), run.tokens_per_second()   what was reported, converted by the row's own convention
    run.cannot                                    why the planner cannot predict it; empty where it can

The rows are in data/published/runs.csv, what the columns mean is in the README beside it.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fmlab.planner import published_cells as cells
from fmlab.planner import reported
from fmlab.planner.published_gaps import assumptions, why_not
from fmlab.planner.shapes import ModelShape

#: how a row's FLOPs are counted, by the beginning of what its columns say
CONVENTIONS = {
    "model, causal-halved": "causal-halved",
    "model, full attention": "full-attention",
    "model (MFU) full attention": "full-attention",
    "hardware, full recompute": "full-recompute",
}


@dataclass(frozen=True)
class PublishedRun:
    """One row. None: the source does not say. Sizes are whole numbers, times seconds, rates per second.

    group: the publication. params: in units. ffn: inner width of a feed-forward network; gated: it has three
    matrices. chip: its name in fmlab.chips (None: not known there), chip_printed: as the source calls it.
    chips: ranks: where a source counts cores (Trainium), `chip` is a core and so are they.
    precision: dtype of the matrix products, precision_printed: as printed.
    data, tensor, pipeline, context, expert: degrees. virtual_stages: of a pipeline rank.
    sharding: how the data ranks divide the states, replicas: copies of the states among them.
    micro_batch: rows of a data rank that are run at once; global_batch: rows of a step.
    recompute: what is computed again in the backward pass, see published_cells.
    attention: "fused" (flash attention and its like), or "unfused": scores go through memory.
    convention: how reported FLOPs and utilisations are counted: "full-attention" (model FLOPs, every pair of
    positions), "causal-halved" (half of the pairs), "full-recompute" (FLOPs done, a second forward pass
    counted), "8ND" (8 times parameters and tokens). None: unknown, and such figures are not converted.
    assumed: what the row does not say and was filled in, and from where. cannot: why it is not predicted.
    """

    id: str
    group: str
    model: str
    params: float | None
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_width: int | None
    ffn: int | None
    gated: bool
    vocab: int | None
    seq_len: int | None
    arch: str
    chip: str | None
    chip_printed: str
    chips: int | None
    precision: str | None
    precision_printed: str
    data: int | None
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual_stages: int | None
    sequence_parallel: bool
    sharding: cells.Sharding
    replicas: int
    micro_batch: int | None
    global_batch: int | None
    micro_batches: int | None
    recompute: cells.Recompute | None
    attention: str
    convention: str | None
    peak_tflops: float | None
    tflops: float | None
    mfu: float | None
    hfu: float | None
    tokens_second_chip: float | None
    tokens_second: float | None
    sequences_second: float | None
    step_printed: float | None
    memory_gib: float | None
    total_flops: float | None
    tokens: float | None
    chip_hours: float | None
    fully_specified: bool
    date: str
    notes: str
    source: str
    assumed: tuple[str, ...] = ()
    cannot: str = ""

    def shape(self) -> ModelShape:
        """The model. ValueError where the row does not give every size."""
        return reported.shape(self)

    def step_seconds(self) -> float:
        """Seconds of a step, as reported or converted. ValueError where nothing that was reported gives
        it."""
        return reported.step_seconds(self)

    def tokens_per_second(self) -> float:
        """Tokens a second of all chips together, as reported or converted."""
        return reported.tokens_per_second(self)


def runs(
    group: str | None = None, fully_specified: bool | None = None, path: str | Path | None = None
) -> tuple[PublishedRun, ...]:
    """The rows of the published record, in the order of the file.

    group: of one publication only. fully_specified: only rows that are (True) or are not (False).
    path: another file with the same columns; by default the one that comes with fmlab.
    Raises ValueError for an unknown group, and for a cell that cannot be read: it names row and column.
    """
    found = _shipped() if path is None else read(Path(path))
    groups = list(dict.fromkeys(run.group for run in found))
    if group is not None and group not in groups:
        raise ValueError(f"no group {group!r} in the published record; there are {', '.join(groups)}")
    return tuple(
        run for run in found if group in (None, run.group) and fully_specified in (None, run.fully_specified)
    )


def groups() -> tuple[str, ...]:
    """The publications, in the order of the file."""
    return tuple(dict.fromkeys(run.group for run in runs()))


@cache
def _shipped() -> tuple[PublishedRun, ...]:
    return read(shipped())


def shipped() -> Path:
    """Where runs.csv is: beside fmlab in its repository, inside fmlab where it is installed from a wheel."""
    package = Path(str(files("fmlab")))
    for folder in (package.parent / "data", package / "_data"):
        if (folder / "published" / "runs.csv").is_file():
            return folder / "published" / "runs.csv"
    raise ValueError(
        f"runs.csv of the published record is neither beside nor inside {package}; reinstall fmlab"
    )


def read(path: Path) -> tuple[PublishedRun, ...]:
    """The rows of a file. Raises ValueError for a missing column, a doubled id, a cell that is not
    understood."""
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        missing = COLUMNS - set(table.fieldnames or ())
        if missing:
            raise ValueError(f"{path.name} has no column {', '.join(sorted(missing))}")
        found = tuple(_run(row) for row in table)
    _check_ids(run.id for run in found)
    return found


def _check_ids(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for one in ids:
        if not one or one in seen:
            raise ValueError(f"row {one!r}: every row needs an id of its own")
        seen.add(one)


def _run(row: dict[str, str]) -> PublishedRun:
    cut = [name for name, text in row.items() if text is None or name is None]
    if cut:
        raise ValueError(f"row {row['id']!r} has not as many cells as there are columns")

    def cell(name: str, reader: Any) -> Any:
        try:
            return reader(row[name])
        except ValueError as error:
            raise ValueError(f"row {row['id']!r}, column {name}: {error}") from error

    whole, number = cells.whole, cells.number
    sharding, among = cell("fsdp_zero", cells.sharding)
    tensor, pipeline, context = (cell(name, whole) or 1 for name in ("tp", "pp", "cp"))
    chip, chips = cells.chip_name(row["chip"]), cell("n_chips", whole)
    rate = cell("tok_s_per_chip", number)
    if chip == "trn1" and chips and (cell("dp", whole) or 0) * tensor * pipeline == 2 * chips:
        chip, chips, rate = "trn1-core", 2 * chips, None if rate is None else rate / 2  # ranks are cores
    data = chips // (tensor * pipeline * context) if chips else cell("dp", whole)
    params = cell("params_b", number)
    mfu, hfu = cell("mfu_pct", number), cell("hfu_pct", number)
    filled: dict[str, Any] = {
        "layers": cell("layers", whole),
        "hidden": cell("hidden", whole),
        "heads": cell("heads", whole),
        "kv_heads": cell("kv_heads", whole),
        "ffn": cell("ffn", whole),
        "vocab": cell("vocab", whole),
        "global_batch": cell("gbs_seqs", whole),
        "micro_batch": cell("mbs", whole),
        "micro_batches": cell("grad_accum", whole),
        "recompute": cell("recompute", cells.recompute),
        "virtual_stages": None if row["vpp"] == "yes" else cell("vpp", whole),
        "sequence_parallel": cell("sp", cells.flag),
        "sharding": sharding,
        "replicas": data // (among or data) if data else 1,
        "data": data,
        "head_width": None,
        "gated": False,
        "attention": "fused",
    }
    assumed = assumptions(row, filled, tensor, pipeline)
    run = PublishedRun(
        id=row["id"],
        group=row["group"],
        model=row["model"],
        params=None if params is None else params * 1e9,
        seq_len=cell("seq", whole),
        arch=row["arch_notes"],
        chip=chip,
        chip_printed=row["chip"],
        chips=chips,
        precision=cell("precision", cells.precision),
        precision_printed=row["precision"],
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=cell("ep", whole) or 1,
        convention=_convention(row),
        peak_tflops=cell("peak_tflops_basis", number),
        tflops=cell("tflops_per_chip", number),
        mfu=None if mfu is None else mfu / 100,
        hfu=None if hfu is None else hfu / 100,
        tokens_second_chip=rate,
        tokens_second=cell("tok_s_total", number),
        sequences_second=cell("seq_s_total", number),
        step_printed=cell("step_time_s", number),
        memory_gib=cell("mem_gib_per_chip", number),
        total_flops=cell("total_flops", number),
        tokens=cell("tokens_total", number),
        chip_hours=cell("accel_hours", number),
        fully_specified=cell("fully_specified", cells.flag) is True,
        date=row["date"],
        notes=row["notes"],
        source=row["source"],
        assumed=assumed,
        **filled,
    )
    object.__setattr__(run, "cannot", why_not(run))
    return run


def _convention(row: dict[str, str]) -> str | None:
    for printed, name in CONVENTIONS.items():
        if row["flops_convention"].startswith(printed):
            return name
    if row["tflops_kind"].startswith("hardware (4*2"):
        return "8ND"
    return {"hardware": "full-recompute", "model": "full-attention"}.get(row["tflops_kind"])


_NAMES = """
id group model params_b layers hidden heads kv_heads ffn vocab seq arch_notes chip n_chips peak_tflops_basis
precision dp tp pp cp ep vpp sp fsdp_zero mbs gbs_seqs grad_accum recompute tflops_per_chip tflops_kind
flops_convention mfu_pct hfu_pct tok_s_per_chip tok_s_total seq_s_total step_time_s mem_gib_per_chip
total_flops tokens_total accel_hours fully_specified date notes source
"""
COLUMNS = frozenset(_NAMES.split())
