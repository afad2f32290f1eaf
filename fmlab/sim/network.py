"""What a message between simulated chips costs, and over which wires it goes."""

from collections.abc import Callable, Sequence

from fmlab.chips import Chip, Topology, switch
from fmlab.collectives import cost
from fmlab.collectives.machines import Machine

#: (kind of collective, bytes of its whole tensor, ranks) -> modelled seconds
Price = Callable[[str, int, Sequence[int]], float]
#: kinds that torch has and the cost model has under another name or as a part
_LIKE = {"gather": "all_gather", "scatter": "all_gather"}


class Network:
    """Prices the messages of simulated chips.

    wires: a topology where rank r is chip r; a machine that was measured; a function of yours; or None, for
    chips of this kind on one switch, each with the bandwidth of all its links and no latency.
    """

    def __init__(self, chip: Chip, wires: Topology | Machine | Price | None = None) -> None:
        self.chip, self.wires = chip, wires
        self._switches: dict[int, Topology] = {}

    def seconds(self, kind: str, payload: int, ranks: Sequence[int]) -> float:
        """Modelled seconds of one message or collective over `ranks` (global numbers, in the group's order).

        gather and scatter cost all_gather costs.
        Raises ValueError for a chip of which no source gives the bandwidth of its links, and for a rank that
        the topology has no chip for.
        """
        if len(ranks) < 2:
            return 0.0
        wires = self.wires
        if wires is None:
            wires, ranks = self._switch(len(ranks)), range(len(ranks))
        if not isinstance(wires, Topology | Machine):
            return wires(kind, payload, ranks)
        if isinstance(wires, Topology):
            self._check(wires, ranks)
            if kind in ("send", "recv"):
                return wires.seconds(ranks[0], ranks[1], payload)
        elif kind in ("send", "recv"):
            raise ValueError(f"{wires.name} is a fit to collectives and prices no send; give a topology")
        return cost.seconds(_LIKE.get(kind, kind), payload, wires, ranks=ranks)

    def _switch(self, size: int) -> Topology:
        if size not in self._switches:
            self._switches[size] = switch(size, self.chip.link_bandwidth, 0.0)
        return self._switches[size]

    @staticmethod
    def _check(wires: Topology, ranks: Sequence[int]) -> None:
        absent = [rank for rank in ranks if rank >= len(wires.chips)]
        if absent:
            raise ValueError(
                f"rank {absent[0]} has no chip in a topology of {len(wires.chips)} chips; simulate with one "
                "that has a chip for each rank"
            )
