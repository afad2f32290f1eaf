"""Which rank is on which host: told by all at the start, so that a host that is gone can still be named.

gloo says which address it has lost, NCCL says less, and a host that is gone says nothing.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fmlab.addresses import addresses, is_loopback

_KEY = "fmlab/roll"


@dataclass(frozen=True)
class Place:
    """Where a rank is: the name of its host, and the host's addresses on networks that it shares."""

    host: str
    addresses: tuple[str, ...] = ()


class Roll:
    """The places of all ranks, by rank."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places

    def __str__(self) -> str:
        """`ranks 0, 1 on host-0 (10.0.0.1); rank 2 on host-1 (10.0.0.2)`"""
        return "; ".join(self.of(place) for place in dict.fromkeys(self.places))

    def of(self, place: Place) -> str:
        """A host with its ranks."""
        ranks = [str(rank) for rank, each in enumerate(self.places) if each == place]
        at = f" ({', '.join(place.addresses)})" if place.addresses else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} on {place.host}{at}"

    def of_ranks(self, ranks: Sequence[int]) -> str:
        """The hosts of some ranks."""
        return "; ".join(dict.fromkeys(self.of(self.places[rank]) for rank in ranks))

    def named_in(self, text: str) -> list[Place]:
        """The hosts whose addresses stand in a text, as gloo's errors have them: `[10.0.0.2]:4711`."""
        return [
            place
            for place in dict.fromkeys(self.places)
            if any(f"[{each}]" in text for each in place.addresses)
        ]


def several_hosts() -> bool:
    """Whether a launcher has started ranks on other hosts, too."""
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))
    return here is not None and here != os.environ.get("WORLD_SIZE", here)


def call_roll(store: Any, rank: int, size: int) -> Roll:
    """Tell and ask, through the store in which the ranks of this start have met; every rank calls it."""
    own = [each for each in addresses() if not is_loopback(each)]
    store.set(f"{_KEY}/{rank}", json.dumps([socket.gethostname(), own]))
    told = [json.loads(text) for text in store.multi_get([f"{_KEY}/{each}" for each in range(size)])]
    return Roll([Place(host, tuple(found)) for host, found in told])


@contextmanager
def naming(roll: Roll | None) -> Iterator[None]:
    """Add to an error of communication that leaves the block which host it is about, or who is where."""
    try:
        yield
    except RuntimeError as error:
        if roll is not None:
            lost = roll.named_in(str(error))
            said = "; ".join(map(roll.of, lost))
            error.add_note(f"the connection that broke leads to {said}" if lost else f"who is where: {roll}")
        raise
