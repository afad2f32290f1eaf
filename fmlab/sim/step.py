"""One training step of all ranks as tasks for the replay: the passes, and their messages.

Ranks of a tensor group do the same work and meet all the time, and so do replicas. So one rank stands for all
of its stage: a message of its tensor group is time on its own compute lane, and a message between replicas
starts when this one is ready. With `expand` every rank is there and every collective is a meeting; both give
the same times as long as all ranks are equally fast, which tests show, and one that is slower (`slow`) can
only be seen with all of them.

Lanes of a rank: "compute"; "send forward" and "send backward" (a message delays who waits for it, not the
sender); "gather" and "reduce" (messages between replicas, behind the back of computing).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from fmlab.sim.fabric import Fabric
from fmlab.sim.program import Chunk, Pass, Program
from fmlab.sim.replay import Task
from fmlab.sim.schedule import Action, source_of

MIB = 2**20
Key = Hashable
Member = tuple[int, int]  # (replica, shard) of a rank of a stage


@dataclass(frozen=True)
class Part:
    """Which piece of the program a task of a compute lane is, for those who want to look inside.

    passes: what it runs; computing, talking: seconds of operations, and of its tensor group's messages
    """

    stage: int
    action: Action
    passes: tuple[Pass, ...]
    blocks: tuple[int, ...]
    computing: float
    talking: float


@dataclass
class Step:
    """The tasks of a step. parts[i]: what task i of a compute lane runs; ranks: those that are there."""

    tasks: list[Task] = field(default_factory=list)
    parts: dict[int, Part] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()


class Builder:
    """Writes tasks down under keys, so that one may wait for another that comes later.

    actions: of each stage; fabric: prices messages (None with one rank)
    expand: all ranks instead of one a stage; slow: rank -> how many times slower it computes
    """

    def __init__(
        self,
        program: Program,
        actions: Sequence[Sequence[Action]],
        fabric: Fabric | None,
        expand: bool = False,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self.program, self.split, self.actions = program, program.split, actions
        self.fabric, self.expand, self.slow = fabric, expand, dict(slow or {})
        self.shards = range(self.split.tensor if expand else 1)
        self.replicas = range(self.split.data if expand else 1)
        self.members: list[Member] = [(r, s) for r in self.replicas for s in self.shards]
        self.step = Step()
        self._drafts: list[tuple[Task, Sequence[Key]]] = []
        self._at: dict[Key, int] = {}
        self._recent: dict[int, list[Key]] = {}  # rank -> keys of its tasks on the compute lane
        self._costs: dict[Key, tuple[tuple[Pass, ...], float, float]] = {}
        self._reduced: dict[tuple[int, int], Key] = {}  # (stage, shard) -> its last message of gradients

    # ---- tasks -------------------------------------------------------------------------------------------

    def add(
        self,
        key: Key,
        name: str,
        seconds: float,
        lanes: Sequence[Hashable],
        after: Sequence[Key],
        kind: str,
        wires: tuple[Hashable, ...] = (),
    ) -> None:
        """Write a task down; it waits for the tasks under the keys `after`."""
        self._at[key] = len(self._drafts)
        self._drafts.append((Task(name, seconds, tuple(lanes), wires=wires, kind=kind), after))

    def finish(self) -> Step:
        """The tasks, with keys turned into positions."""
        for task, after in self._drafts:
            task.after = tuple(dict.fromkeys(self._at[key] for key in after))
            self.step.tasks.append(task)
        self.step.ranks = tuple(self.ranks())
        return self.step

    def ranks(self) -> list[int]:
        """The ranks that are there."""
        return [self.split.rank(stage, *m) for stage in range(self.split.pipeline) for m in self.members]

    def price(
        self, name: str, payload: int, group: Sequence[int], beside: Sequence[Sequence[int]] = ()
    ) -> float:
        """Seconds of a collective."""
        if len(group) == 1 or not payload:
            return 0.0
        assert self.fabric is not None
        return self.fabric.collective(name, payload, group, beside)

    def reduced(self, rank: int) -> list[Key]:
        """The last message of a rank's gradients, if replicas have any."""
        stage, _, shard = self.split.coordinates(rank)
        key = (stage, shard if self.expand else 0)
        return [self._reduced[key]] if key in self._reduced else []

    # ---- forward and backward ----------------------------------------------------------------------------

    def passes(self) -> None:
        """All forward and backward passes."""
        for stage, actions in enumerate(self.actions):
            last = {a.chunk: i for i, a in enumerate(actions) if a.direction == "backward"}
            for i, action in enumerate(actions):
                self._action(stage, action, final=last.get(action.chunk) == i)

    def _action(self, stage: int, action: Action, final: bool) -> None:
        """One action on all members of a stage, cut into blocks where replicas have messages on the way."""
        chunk = self.program.chunks[action.chunk * self.split.pipeline + stage]
        order = list(range(len(chunk.blocks)))
        if action.direction == "backward":
            order.reverse()
        reduces = self.split.data > 1 and action.direction == "backward" and (final or self.split.zero >= 2)
        gathers = self.split.zero == 3
        pieces = [[i] for i in order] if reduces or gathers else [order]
        waits = self._inputs(stage, action)
        pending = 0
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            if gathers:
                self._gather(stage, action, chunk, piece[0])
            self._piece(stage, action, chunk, piece, waits if not number else {}, last)
            if reduces:
                pending += chunk.block_numel(piece[0]) * self.split.gradient_dtype.itemsize
                if pending and (last or pending >= self.split.bucket_mb * MIB):
                    self._reduce(stage, action, piece[0], pending)
                    pending = 0
        self._send(stage, action, chunk)

    def _inputs(self, stage: int, action: Action) -> dict[Member, list[Key]]:
        """What each member of the stage must have before it can start."""
        source = source_of(action, stage, self.split.pipeline, self.split.virtual_stages)
        found = {}
        for member in self.members:
            keys: list[Key] = [] if source is None else [("send", *source, member)]
            if action.direction == "backward":
                keys.append(("done", stage, Action("forward", action.micro_batch, action.chunk), member))
            found[member] = keys
        return found

    def _cost(
        self, stage: int, action: Action, chunk: Chunk, piece: list[int]
    ) -> tuple[tuple[Pass, ...], float, float]:
        """What a piece runs, and its seconds of operations and of messages: alike for most micro-batches."""
        first = action.micro_batch == 0 or self.split.zero >= 2  # ZeRO 2 keeps no sum of whole gradients
        kind = "forward" if action.direction == "forward" else "first" if first else "later"
        key = (stage, action.chunk, kind, piece[0], len(piece))
        if key not in self._costs:
            passes = tuple(getattr(chunk.traces[i], kind) for i in piece)
            computing = sum(one.seconds for one in passes)
            self._costs[key] = (passes, computing, self._talking(stage, passes))
        return self._costs[key]

    def _piece(
        self,
        stage: int,
        action: Action,
        chunk: Chunk,
        piece: list[int],
        waits: Mapping[Member, list[Key]],
        last: bool,
    ) -> None:
        """Some blocks of a chunk on all members, with the messages of their tensor groups."""
        passes, computing, talking = self._cost(stage, action, chunk, piece)
        blocks = tuple(chunk.blocks[i] for i in piece)
        name = f"{action}" + (f" block {blocks[0]}" if len(piece) < len(chunk.blocks) else "")
        meets = self.expand and self.split.tensor > 1
        for member in self.members:
            rank = self.split.rank(stage, *member)
            key: Key = ("done", stage, action, member) if last else ("part", stage, action, piece[0], member)
            after = list(waits.get(member, []))
            if self.split.zero == 3:
                after.append(("gather", stage, action, piece[0], member[1]))
            seconds = computing * self.slow.get(rank, 1.0)
            part = Part(stage, action, passes, blocks, seconds, 0.0 if meets else talking)
            self.step.parts[len(self._drafts)] = part
            self.add(key, name, seconds + part.talking, [(rank, "compute")], after, action.direction)
            self._recent.setdefault(rank, []).append(key)
        if meets:
            for replica in self.replicas:
                group = self.split.tensor_group(stage, replica)
                lanes = [(rank, "compute") for rank in group]
                self.add(
                    ("meet", stage, action, piece[0], replica), f"{name} tensor", talking, lanes, [], "tensor"
                )
                for rank in group:  # what waits for the piece waits for its messages
                    self._at[self._recent[rank][-1]] = len(self._drafts) - 1

    def _talking(self, stage: int, passes: Sequence[Pass]) -> float:
        if self.split.tensor == 1:
            return 0.0
        group = self.split.tensor_group(stage)
        beside = self.split.other_tensor_groups(stage)
        return sum(
            count * self.price(name, payload, group, beside)
            for one in passes
            for (name, payload), count in one.messages.items()
        )

    def _send(self, stage: int, action: Action, chunk: Chunk) -> None:
        """Hand on activations or gradients to the stage that waits for them."""
        forward = action.direction == "forward"
        payload = chunk.sends if forward else chunk.receives
        if not payload:
            return
        other = (stage + (1 if forward else -1)) % self.split.pipeline
        for member in self.members:
            a, b = self.split.rank(stage, *member), self.split.rank(other, *member)
            assert self.fabric is not None
            lane, done = (a, f"send {action.direction}"), ("done", stage, action, member)
            name = f"send {action} to rank {b}"
            self.add(
                ("send", stage, action, member),
                name,
                self.fabric.send(a, b, payload),
                [lane],
                [done],
                "pipeline",
            )

    # ---- between replicas --------------------------------------------------------------------------------

    def members_of(self, stage: int, shard: int) -> list[int]:
        """The ranks that are there and hold one shard of a stage: its replicas."""
        return [self.split.rank(stage, replica, shard) for replica in self.replicas]

    def between_replicas(
        self,
        key: tuple[Key, ...],
        stage: int,
        name: str,
        payload: int,
        lane: str,
        after: Mapping[int, Sequence[Key]],
    ) -> None:
        """A collective of the data group of each shard, all at the same time; its key is (*key, shard).

        Gathers and sums of the same group go over the same links, so they hold them one after the other.
        """
        groups = [self.split.data_group(stage, shard) for shard in range(self.split.tensor)]
        seconds = self.price(name, payload, groups[0], groups[1:])
        for shard in self.shards:
            lanes = [(rank, lane) for rank in self.members_of(stage, shard)]
            wires = (("replicas of", stage, shard),)
            self.add((*key, shard), name, seconds, lanes, after[shard], "data", wires)

    def _gather(self, stage: int, action: Action, chunk: Chunk, block: int) -> None:
        """ZeRO 3: bring a block's weights together, one block ahead of the one at work."""
        payload = chunk.block_numel(block) * self.split.dtype.itemsize
        after = {
            shard: [
                key for rank in self.members_of(stage, shard) for key in self._recent.get(rank, [])[-2:-1]
            ]
            for shard in self.shards
        }
        self.between_replicas(("gather", stage, action, block), stage, "all_gather", payload, "gather", after)

    def _reduce(self, stage: int, action: Action, block: int, payload: int) -> None:
        """Add up the gradients of the replicas, while the backward pass goes on."""
        name = "reduce_scatter" if self.split.zero else "all_reduce"
        key = ("reduce", stage, action, block)
        after = {s: [self._recent[rank][-1] for rank in self.members_of(stage, s)] for s in self.shards}
        self.between_replicas(key, stage, name, payload, "reduce", after)
        self._reduced.update({(stage, shard): (*key, shard) for shard in self.shards})
