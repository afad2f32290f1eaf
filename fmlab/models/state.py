"""State and Block: the two ideas every model here is made of.

A model is an ordered list of blocks. A block maps a `State`, a dictionary of named tensors, to a new State
and declares which names it reads and writes. A pipeline can therefore cut any model between two blocks and
send only the names that the rest still reads.

Names in use (b batch, l length, d hidden width, v vocabulary):

    input_ids[b,l]  position_ids[b,l]  attention_mask[b,l] (1 real, 0 pad)  document_ids[b,l]  labels[b,l]
    hidden[b,l,d]   logits[b,l,v]      loss_sum[]   prefix_lengths[b]

With two streams (T5): the encoder's are `input_ids`, `attention_mask`, `encoder_hidden`, `encoder_bias`; the
decoder's are `decoder_input_ids`, `decoder_attention_mask`, `hidden`, `decoder_bias`, and all of the above.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


class State(OrderedDict[str, Tensor]):
    """Named tensors on their way through the blocks; `state.hidden` reads `state["hidden"]`.

    Two things ride along without being tensors, and are never sent to another process:

    - `cache`: the key/value cache of a generation, or None;
    - `derived`: what blocks work out once in a forward pass and share, such as the attention mask.

    An OrderedDict, because FSDP's mixed precision rebuilds those in their own class and makes any other
    mapping a plain dict. What rides along is lost there: masks are made again, a lost cache is an error.
    """

    def __init__(self, *args: Any, cache: Any = None, derived: dict[str, Any] | None = None, **names: Tensor):
        super().__init__(*args, **names)
        self.cache = cache
        self.derived: dict[str, Any] = {} if derived is None else derived

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this State has no {name!r}; it holds {sorted(self)}") from None

    def updated(self, **names: Tensor) -> "State":
        """A new State with `names` set or replaced. The old one is left as it was."""
        return State({**self, **names}, cache=self.cache, derived=self.derived)

    def only(self, names: Iterable[str]) -> "State":
        """A new State with just those of `names` that are present, as a pipeline stage would receive it."""
        return State({name: self[name] for name in names if name in self}, cache=self.cache)

    def without(self, name: str) -> "State":
        """A new State without `name`, for a tensor that nobody reads again."""
        rest = {other: tensor for other, tensor in self.items() if other != name}
        return State(rest, cache=self.cache, derived=self.derived)

    def once(self, key: str, build: Callable[[], Any]) -> Any:
        """`build()` at the first call in this forward pass, the same object afterwards."""
        if key not in self.derived:
            self.derived[key] = build()
        return self.derived[key]


def _flatten(state: State) -> tuple[list[Tensor], tuple[tuple[str, ...], Any, dict[str, Any]]]:
    return list(state.values()), (tuple(state), state.cache, state.derived)


def _unflatten(values: Iterable[Tensor], context: tuple[tuple[str, ...], Any, dict[str, Any]]) -> State:
    names, cache, derived = context
    return State(zip(names, values, strict=True), cache=cache, derived=derived)


# Wrappers such as FSDP find the tensors inside a module's inputs and outputs with pytree, which looks up the
# exact type: an unregistered subclass of dict would count as one opaque leaf, and its hooks would never fire.
pytree.register_pytree_node(State, _flatten, _unflatten, serialized_type_name="fmlab.State")


def stream_length(state: State, stream: str) -> int:
    """How many positions the stream [b,l,d] has, of which this rank may hold a part only.

    What divides a stream (sequence parallelism) notes its whole length in `derived`; masks and biases, which
    are between all positions, are made from that.
    """
    length: int | None = state.derived.get(f"{stream} positions")
    return state[stream].shape[1] if length is None else length


class Block(nn.Module):
    """One step of a model: `forward(state) -> state`, with its inputs and outputs declared.

    `reads` may list optional names (`attention_mask`); a block must do without those that are absent. Where
    blocks of one class differ (the first layer of T5 makes what the others read), `__init__` sets them.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def forward(self, state: State) -> State:
        raise NotImplementedError


def live_names(blocks: Sequence[Block], cut: int) -> list[str]:
    """The names that `blocks[cut:]` read before they write them: what a pipeline sends at `cut`."""
    live: list[str] = []
    written: set[str] = set()
    for block in blocks[cut:]:
        live += [name for name in block.reads if name not in written and name not in live]
        written.update(block.writes)
    return live
