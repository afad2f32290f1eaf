"""What a learner sees when ranks fail: who, in which call, at which line, within the time limit."""

import ctypes
import linecache
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmlab import RankError, Ranks

pytestmark = pytest.mark.multirank
LIMIT = 2.5
AT = r"(?: \(hosts? [ab, ]+\))?"  # where a rank is, said on a cluster


def raise_on_rank_2() -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        raise KeyError("weight")


def raise_everywhere() -> None:
    torch.ones(2) @ torch.ones(3)


def die_on_rank_1(how: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        print("last words", flush=True)
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(4))


def skip_on_rank_3() -> None:
    if dist.get_rank() != 3:
        dist.all_reduce(torch.ones(4))


def only_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))


def late_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)  # late
    dist.all_reduce(torch.ones(2, 3))


def hold_the_lock_on_rank_1() -> None:
    if dist.get_rank() == 1:
        holds_lock, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        holds_lock.pthread_mutex_lock(mutex)
        holds_lock.pthread_mutex_lock(mutex)  # never returns, and no other thread can run
    dist.all_reduce(torch.ones(2))


def with_a_broken_cache_of_sources() -> None:
    """What the second thread reads to say where the first one is has an entry without lines."""
    linecache.cache[__file__] = (1, None, None, __file__)  # type: ignore[assignment]
    time.sleep(1.5)  # the parent asks meanwhile


def other_tensor(shape_of_1: tuple[int, ...], dtype_of_1: torch.dtype) -> None:
    odd = dist.get_rank() == 1
    t = torch.ones(shape_of_1, dtype=dtype_of_1) if odd else torch.ones(4)
    dist.all_reduce(t)  # odd one out


def other_op() -> None:
    t = torch.ones(4)
    if dist.get_rank() == 1:
        dist.broadcast(t, 1)
    else:
        dist.all_reduce(t)


def other_order() -> None:
    a, b = torch.ones(4), torch.ones(4, dtype=torch.int32)
    for t in (a, b) if dist.get_rank() else (b, a):
        dist.all_reduce(t)


def receive_from_nobody() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(5), src=1)


def sub_groups() -> list[float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    mine = pairs[rank // 2]
    t = torch.full((1 + rank // 2,), float(rank))
    for _ in range(1 + rank // 2):  # the pairs do different things, each pair agrees
        dist.all_reduce(t, group=mine)
    if rank == 0:
        dist.send(torch.ones(3), 3)
    if rank == 3:
        dist.recv(torch.ones(3), 0)
    return t.tolist()


def test_exception_names_rank_error_and_line_and_keeps_the_ranks(ranks4: Ranks) -> None:
    pids = ranks4.pids
    with pytest.raises(RankError) as info:
        ranks4.run(raise_on_rank_2, timeout=LIMIT)
    error = info.value
    assert (error.rank, error.error) == (2, "KeyError: 'weight'")
    assert [o.kind for o in error.outcomes] == ["ok", "ok", "raised", "ok"]
    assert 'raise KeyError("weight")' in str(error)
    assert "worker.py" not in str(error)
    assert not error.restarted
    assert ranks4.pids == pids
    assert ranks4.run(dist.get_rank) == [0, 1, 2, 3]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def fail_without_words() -> None:
    raise Unspeakable


def test_an_error_whose_message_fails_keeps_the_ranks(ranks2: Ranks) -> None:
    pids = ranks2.pids
    with pytest.raises(RankError, match=r"Unspeakable: \(its message cannot be shown: RuntimeError\)"):
        ranks2.run(fail_without_words)
    assert ranks2.pids == pids


def test_of_a_deep_stack_the_first_line_and_the_last_are_told(ranks2: Ranks) -> None:
    source = "def deeper(n):\n    return deeper(n - 1) if n else 1 / 0\ndeeper(20)"
    with pytest.raises(RankError) as caught:
        ranks2.run_cell(source)
    frames = caught.value.outcomes[0].frames
    assert (frames[0].line, frames[0].function, frames[-1].line) == (3, "<module>", 2)
    assert len(frames) == 8


def test_the_same_error_on_all_ranks_is_told_once(ranks4: Ranks) -> None:
    with pytest.raises(RankError, match=r"all 4 ranks: RuntimeError: ") as info:
        ranks4.run(raise_everywhere)
    assert str(info.value).count("RuntimeError") == 1


@pytest.mark.parametrize(
    ("how", "why"), [("exit", "exit code 7"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV")]
)
def test_a_dead_rank_is_named_with_what_the_others_waited_in(
    ranks4: Ranks, how: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=why) as info:
        ranks4.run(die_on_rank_1, how, timeout=30)
    assert time.monotonic() - start < 6
    assert info.value.rank == 1
    assert info.value.restarted
    assert "[rank 1] last words" in capsys.readouterr().out
    assert ranks4.run(dist.get_rank) == [0, 1, 2, 3]


def test_a_rank_that_died_between_calls_is_reported(ranks2: Ranks) -> None:
    os.kill(ranks2.pids[1], signal.SIGKILL)
    until = time.monotonic() + 5
    while ranks2.alive and time.monotonic() < until:
        time.sleep(0.05)
    assert not ranks2.alive
    with pytest.raises(RankError, match=rf"rank 1{AT} died before the call of get_rank: .*SIGKILL") as info:
        ranks2.run(dist.get_rank)
    assert info.value.restarted
    assert ranks2.run(dist.get_rank) == [0, 1]


def test_a_skipped_collective_is_found_before_the_time_limit(ranks4: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match=rf"rank 3{AT} returned and did not enter all_reduce #\d+ float32\[4\]"
    ) as info:
        ranks4.run(skip_on_rank_3, timeout=30)
    assert time.monotonic() - start < 6
    assert info.value.rank == 3
    assert "dist.all_reduce(torch.ones(4))" in str(info.value)
    assert ranks4.run(dist.get_rank) == [0, 1, 2, 3]


def test_a_collective_that_only_one_rank_enters_is_told(ranks4: Ranks) -> None:
    with pytest.raises(
        RankError, match=rf"rank 0{AT} entered all_?reduce .*, which ranks 1-3{AT} did not enter"
    ):
        ranks4.run(only_on_rank_0)


def test_the_time_limit_names_who_is_late_and_who_waits_where(ranks4: Ranks) -> None:
    with pytest.raises(
        RankError, match=rf"2.5 s: rank 0{AT} did not enter all_reduce #\d+ float32\[2, 3\]"
    ) as info:
        ranks4.run(late_on_rank_0, timeout=LIMIT)
    assert info.value.rank == 0
    assert "time.sleep(60)  # late" in str(info.value)
    assert info.value.restarted


def test_a_rank_in_which_no_thread_can_run_still_says_where_it_is(ranks2: Ranks, capfd: Any) -> None:
    with pytest.raises(RankError) as info:
        ranks2.run(hold_the_lock_on_rank_1, timeout=LIMIT)
    stuck = info.value.outcomes[1]
    assert stuck.where == "a call that does not let it answer"
    assert stuck.frames[-1].function == "hold_the_lock_on_rank_1"
    assert "# never returns" in str(info.value)
    assert "answer_questions" in capfd.readouterr().err  # the stack of each thread is shown too


def test_a_rank_that_cannot_say_where_it_is_still_takes_calls(ranks2: Ranks) -> None:
    ranks2.run(with_a_broken_cache_of_sources)
    assert ranks2.run(dist.get_rank, timeout=5) == [0, 1]


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((4,), torch.int32, r"int32\[4\]"),
        ((2, 2), torch.float32, r"float32\[2, 2\]"),
        ((8,), torch.float32, r"\[8\]"),
    ],
)
def test_ranks_that_disagree_about_a_tensor(
    ranks4: Ranks, shape: tuple[int, ...], dtype: torch.dtype, said: str
) -> None:
    pattern = (
        rf"rank 1{AT} entered all_reduce #\d+ \w*{said} "
        rf"where ranks 0, 2-3{AT} entered all_reduce #\d+ float32\[4\]"
    )
    with pytest.raises(RankError, match=pattern) as info:
        ranks4.run(other_tensor, shape, dtype, timeout=LIMIT)
    assert info.value.rank == 1
    assert "# odd one out" in str(info.value)
    assert ranks4.run(dist.get_rank) == [0, 1, 2, 3]


def test_ranks_that_disagree_about_the_operation(ranks4: Ranks) -> None:
    with pytest.raises(
        RankError, match=rf"rank 1{AT} entered broadcast #\d+ .* where ranks 0, 2-3{AT} entered all_reduce"
    ):
        ranks4.run(other_op, timeout=LIMIT)


def test_ranks_that_disagree_about_the_order_without_a_hang(ranks2: Ranks) -> None:
    pattern = rf"rank 1{AT} entered .* float32\[4\] where rank 0{AT} entered .* int32\[4\]"
    with pytest.raises(RankError, match=pattern):
        ranks2.run(other_order, timeout=LIMIT)


def test_a_receive_without_a_send_is_named(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match=rf"rank 0{AT} had not returned") as info:
        ranks2.run(receive_from_nobody, timeout=LIMIT)
    assert info.value.call == "recv float32[5] from rank 1"


def test_groups_and_point_to_point_calls_may_differ(ranks4: Ranks) -> None:
    assert ranks4.run(sub_groups) == [[1.0], [1.0], [20.0 / 2] * 2, [10.0] * 2]


def test_interrupt_stops_python_code_and_keeps_the_ranks(ranks2: Ranks) -> None:
    pids = ranks2.pids
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks2.run(time.sleep, 30)
    assert ranks2.pids == pids
    assert ranks2.run(dist.get_rank) == [0, 1]


def test_interrupt_of_a_blocked_collective_restarts_in_place(ranks2: Ranks) -> None:
    def wait_for_peer() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            time.sleep(30)

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks2.run(wait_for_peer)
    assert ranks2.run(dist.get_rank) == [0, 1]
