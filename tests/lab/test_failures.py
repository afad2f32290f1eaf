"""The faults of chapter 2.10 do what the chapter says of them."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fmlab import Ranks
from fmlab.lab import failures
from fmlab.lab.hangs import verdict_of
from fmlab.planner import goodput_at
from fmlab.train.callbacks import StepMetrics


def _swapped() -> None:
    partner = 1 - dist.get_rank()
    dist.send(torch.ones(3), partner)
    dist.recv(torch.ones(3), partner)


def _one_more_on_rank_0() -> None:
    for _ in range(3 - dist.get_rank()):
        dist.all_reduce(torch.ones(3))


def test_a_flight_recorder_names_a_circle_and_a_rank_that_is_done(ranks2: Ranks) -> None:
    circle = verdict_of(_swapped, ranks2, limit=2.0)
    assert (circle.kind, circle.ranks) == ("deadlock", (0, 1))
    assert "in _swapped" in circle.headline
    assert "hangs.py" not in circle.headline
    assert (verdict_of(_one_more_on_rank_0, ranks2, limit=5.0)).ranks == (1,)


def test_free_memory_in_two_pieces_is_refused_and_one_piece_is_not() -> None:
    memory = failures.Allocator(80)
    memory.allocate("weights", 20)
    memory.allocate("logits", 40)
    memory.free("logits")
    memory.allocate("moments", 20)  # takes half of the hole
    assert (memory.pieces, memory.reserved, memory.allocated) == ([20, 20], 60, 40)
    with pytest.raises(torch.OutOfMemoryError, match="40 are allocated and 20 reserved but unallocated"):
        memory.allocate("logits", 40)
    memory.free("moments")
    memory.allocate("logits", 40)
    assert memory.allocated == 60


def test_the_smallest_piece_that_fits_is_taken_and_free_neighbours_join() -> None:
    memory = failures.Allocator(60)
    memory.allocate("all", 60)
    memory.free("all")
    for owner, size in (("a", 20), ("b", 10), ("c", 10), ("d", 5)):
        memory.allocate(owner, size)
    memory.free("b")
    memory.allocate("e", 10)
    assert memory.pieces == [15, 0], "best fit: the hole of b, not the end"
    memory.free("a")
    memory.free("e")
    memory.allocate("f", 30)  # in the holes of a and e together
    assert memory.pieces == [15, 0]


def test_a_segment_that_is_free_as_a_whole_goes_back_for_a_larger_one() -> None:
    memory = failures.Allocator(80)
    memory.allocate("short", 30)
    memory.free("short")
    memory.allocate("long", 70)
    assert memory.reserved == 70


def test_a_bit_is_flipped_and_flipped_back() -> None:
    numbers = torch.tensor([0.02, -1.5])
    for bit in range(32):
        before = numbers.clone()
        failures.flip_bit(numbers, 1, bit)
        assert numbers[0] == before[0]
        assert not torch.equal(numbers, before)
        failures.flip_bit(numbers, 1, bit)
        assert torch.equal(numbers, before)
    failures.flip_bit(numbers, 1, 31)
    assert numbers[1] == 1.5
    failures.flip_bit(numbers, 0, 30)
    assert numbers[0] > 1e36


def test_fp16_overflows_where_the_activations_are_large_and_the_rest_does_not() -> None:
    batch = failures.rows(2, 16)
    engine = failures.hot_engine()
    assert 65_504 < failures.largest_output(engine, batch) < 3e38
    assert math.isfinite(engine.step([batch]).loss)
    in_fp16 = failures.hot_engine("fp16-scaled").step([batch])
    assert math.isnan(in_fp16.loss)
    assert in_fp16.skipped


def test_programs_are_shapes_and_buckets_make_fewer() -> None:
    assert failures.programs([8, 12, 8, 16]) == 3
    assert failures.programs([8, 12, 8, 16], failures.LengthBuckets((16,))) == 1


@pytest.mark.parametrize("interval", [300.0, 1200.0, 7200.0])
def test_a_run_with_failures_has_the_goodput_of_the_formula(interval: float) -> None:
    formula = goodput_at(interval, checkpoint=60, mean_time=11_000, restart=600).share
    drawn = failures.replayed(3e8, interval, 60, 600, 11_000)
    assert drawn == pytest.approx(formula, rel=0.01)
    assert failures.replayed(1e6, 900, 100, 600, 1e15) == pytest.approx(0.9)


def test_the_causes_are_those_of_419_interruptions() -> None:
    assert sum(times for _, times in failures.LLAMA3_CAUSES) == 419


def test_one_bit_of_a_file_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(9)))
    failures.damage_file(file)
    differ = [(a ^ b).bit_count() for a, b in zip(file.read_bytes(), range(9), strict=True)]
    assert sum(differ) == 1


def test_a_host_dies_after_its_step() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        host = failures.HostDies([process.pid], after=2)
        host.on_step(StepMetrics(1, 1.0, 0.1, 1.0, False, 1.0))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        host.on_step(StepMetrics(2, 1.0, 0.1, 1.0, False, 1.0))
        assert process.wait(10) == -9
    finally:
        process.kill()
