"""The xla backend on one device: programs counted, steps equal to the CPU's, and torch_xla's traps closed."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(run_xla: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run_xla("jobs/backend.py")


@pytest.mark.parametrize(("count", "programs"), [(1, (1, 1)), (4, (3, 1)), (8, (3, 1))])
def test_a_step_compiles_twice_reads_once_and_equals_the_cpu(
    found: dict[str, Any], count: int, programs: tuple[int, int]
) -> None:
    """The second step sees the optimizer's state for the first time. With micro-batches there is one program
    for the first, one for all others but the last, one for the last with the update: whatever their number.
    A third step compiles nothing, though its learning rate is 0.
    """
    rows = found["steps"][str(count)]["rows"]
    assert [row[0] for row in rows] == [*programs, 0]
    assert [row[1] for row in rows] == [count] * 3, "one run a micro-batch, the update with the last"
    assert [row[2] for row in rows] == [1] * 3, "the losses and the norm, after the step"
    assert max(row[3] for row in rows) < 1e-5
    # AdamW makes a whole step of the rounding in a gradient that is nearly 0
    assert found["steps"][str(count)]["weights"] < 3 * 1e-3


def test_without_a_barrier_the_graph_grows_with_each_micro_batch(found: dict[str, Any]) -> None:
    first, second, third = found["growing"]
    assert second > 1.9 * first
    assert third - second == second - first


def test_a_read_in_the_step_is_found_with_its_line_and_costs_a_program(found: dict[str, Any]) -> None:
    assert found["read"]["count"] == 1
    assert "if loss.item() > 0:  # HERE" in found["read"]["text"]
    assert found["read"]["compiles"] == 2


def test_buckets_bound_the_programs_and_keep_the_loss(found: dict[str, Any]) -> None:
    short, padded, host = found["padded"]
    assert padded == pytest.approx(short, rel=5e-7)
    assert padded == pytest.approx(host, rel=1e-6)
    assert found["bucketed compiles"] == 2, "eight lengths, two buckets"


def test_a_cache_of_fixed_shapes_writes_all_tokens_by_one_program(found: dict[str, Any]) -> None:
    assert found["decoding"]["True"]["programs"] == [1, 1, 0, 0, 0], "one reads the prompt, one writes"
    assert min(found["decoding"]["False"]["programs"]) > 0, "one more key each time"
    assert max(run["off"] for run in found["decoding"].values()) < 1e-5


def test_an_evaluation_runs_batch_by_batch(found: dict[str, Any]) -> None:
    assert found["evaluation"]["compiles"] == 2, "the first batch, and those that add to it"
    assert found["evaluation"]["runs"] == 5
    assert found["evaluation"]["error"] < 1e-5


def test_programs_are_seen_before_and_after_optimisation(found: dict[str, Any]) -> None:
    program = found["program"]
    assert "aten::mm" in found["ir"]
    assert found["relu grows"][1] == found["relu grows"][0] + 1, "nothing has run: one more note"
    assert program["before"] == found["hlo"] > 10
    assert program["fusions before"] == 0
    assert "Restart the kernel" in found["nothing compiled"]
    assert program["fusions"] == {"kLoop": 1}
    assert program["dots"] == 1
    assert program["kernels"] == 2, "the product, and all that is pointwise"


def test_the_quirks_are_behind_one_interface(found: dict[str, Any]) -> None:
    assert found["tied"]
    assert found["checkpoint"]
    assert found["seed"]
    assert found["autocast"] == "torch.bfloat16"
    assert found["compiled"] == [3.0, 3.0]
    assert found["host"] == "cpu"
    assert found["describe"] == "torch_xla 2.9.0 on 1 x CPU (xla:0)"
    assert found["memory"] == ["total"], "torch_xla counts nothing on the CPU"


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("read in compiled", "RuntimeError", "Unexpected execution"),
        ("dynamic", "ValueError", "each new shape compiles anew"),
        ("options", "ValueError", "XLA_FLAGS, before it starts"),
        ("late", "ValueError", "would not see CPU_NUM_DEVICES=8: restart"),
        ("ranks", "ValueError", "share one program between virtual devices"),
        ("fp16", "ValueError", "legal: fp32, bf16"),
        ("mesh", "ValueError", "is for 3 devices, and there are 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    found: dict[str, Any], name: str, kind: str, text: str
) -> None:
    assert found["errors"][name].startswith(kind)
    assert text in found["errors"][name]
