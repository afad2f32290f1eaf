"""Ranks know which host each of them is on, also when that host says nothing any more."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from fmlab.train import roll as module
from fmlab.train.roll import Place, Roll, call_roll, naming, several_hosts

ROLL = Roll([Place("a", ("10.0.0.1",)), Place("a", ("10.0.0.1",)), Place("b", ("10.0.0.11", "10.1.0.2"))])


def test_all_ranks_hear_where_each_is(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(module, "addresses", lambda: {"127.0.0.1": "lo", "10.0.0.1": "eth0"})
    heard: list[Any] = [None, None]

    def call(rank: int) -> None:
        heard[rank] = call_roll(store, rank, 2)

    other = threading.Thread(target=call, args=(1,))
    other.start()
    call(0)
    other.join(5)
    assert heard[0].places == heard[1].places
    assert heard[0].places[1].addresses == ("10.0.0.1",)  # none that only the host itself reaches


def test_an_error_names_the_host_at_the_other_end() -> None:
    assert str(ROLL) == "ranks 0, 1 on a (10.0.0.1); rank 2 on b (10.0.0.11, 10.1.0.2)"
    with pytest.raises(RuntimeError) as caught, naming(ROLL):
        raise RuntimeError("Read error [10.0.0.11]:6813: Connection reset by peer")
    assert caught.value.__notes__ == ["the connection that broke leads to rank 2 on b (10.0.0.11, 10.1.0.2)"]
    with pytest.raises(RuntimeError) as caught, naming(ROLL):
        raise RuntimeError("NCCL communicator was aborted")
    assert caught.value.__notes__ == [f"who is where: {ROLL}"]
    with pytest.raises(ValueError, match="x") as other, naming(ROLL):
        raise ValueError("x")
    assert not hasattr(other.value, "__notes__")


@pytest.mark.parametrize(
    ("said", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, True),
    ],
)
def test_launchers_say_whether_there_are_other_hosts(
    said: dict[str, str], several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert several_hosts() == several
