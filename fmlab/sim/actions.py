"""What a stage of a pipeline does, one pass after the other, and what each pass waits for.

A model is cut into stages * virtual_stages chunks; chunk c of a stage s is the model's chunk c * stages + s,
except for the schedule "zbv", where the model goes down the stages and up again in the shape of a V.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward", "input", "weight"]
_LETTERS = {"forward": "F", "backward": "B", "input": "B", "weight": "W"}


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one chunk of a stage.

    A backward pass is whole ("backward"), or in two parts: the gradient of what the chunk was given
    ("input", which the stage before waits for) and that of its weights ("weight", which nobody waits for).
    """

    direction: Direction
    micro_batch: int
    chunk: int = 0  # of this stage: 0..virtual_stages-1

    def __str__(self) -> str:
        return f"{_LETTERS[self.direction]}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def place(kind: str, model_chunk: int, stages: int) -> tuple[int, int]:
    """(stage, chunk of that stage) where chunk `model_chunk` of the model lives."""
    chunk, stage = divmod(model_chunk, stages)
    return (stages - 1 - stage if kind == "zbv" and chunk else stage), chunk


def model_chunk(kind: str, stage: int, chunk: int, stages: int) -> int:
    """Which chunk of the model is chunk `chunk` of a stage: what `place` turns round."""
    return chunk * stages + (stages - 1 - stage if kind == "zbv" and chunk else stage)


def most_in_flight(actions: Sequence[Action]) -> int:
    """The most passes (micro-batch, chunk) whose activations a stage holds at once.

    They are held until the gradients of the weights are there.
    """
    now = most = 0
    for action in actions:
        now += {"forward": 1, "input": 0}.get(action.direction, -1)
        most = max(most, now)
    return most


def source_of(
    action: Action, stage: int, stages: int, chunks: int, kind: str = "1f1b"
) -> tuple[int, Action] | None:
    """The stage and action whose result this one needs; None at either end of the model, and for the
    gradients of weights, which need nothing from another stage."""
    if action.direction == "weight":
        return None
    here = model_chunk(kind, stage, action.chunk, stages)
    there = here + (-1 if action.direction == "forward" else 1)
    if not 0 <= there < stages * chunks:
        return None
    other, chunk = place(kind, there, stages)
    return other, Action(action.direction, action.micro_batch, chunk)
