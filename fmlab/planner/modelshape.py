"""A model as a list of parts, and how many positions each of its streams has."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fmlab.parallel.values import whole
from fmlab.planner.parts import MOST, Embedding, Head, LayerGroup, Part


@dataclass(frozen=True)
class Stream:
    """Positions that parts work on: "tokens", or an encoder's "input" and a decoder's "output", …

    length: how many a row has if nobody says; None where the caller must. fixed: nobody can (patches).
    """

    name: str
    length: int | None = None
    fixed: bool = False


@dataclass(frozen=True)
class ModelShape:
    """What a model is made of, in the order of its blocks.

    name: a preset's, or one of your own. family: the class of fmlab.models that it belongs to.
    positions: most tokens of a row; 0 where nothing limits them.
    """

    name: str
    family: str
    parts: tuple[Part, ...]
    streams: tuple[Stream, ...] = (Stream("tokens"),)
    positions: int = 0

    def __post_init__(self) -> None:
        names = {stream.name for stream in self.streams}
        asked = {part.stream for part in self.parts} | {g.cross_stream for g in self.layers if g.cross_width}
        if unknown := asked - names:
            raise ValueError(
                f"{self.name}: parts work on {sorted(unknown)}, and the streams are {sorted(names)}"
            )

    # ---- parts ---------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[LayerGroup, ...]:
        """The groups of transformer layers."""
        return tuple(part for part in self.parts if isinstance(part, LayerGroup))

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        return tuple(part for part in self.parts if isinstance(part, Head))

    @cached_property
    def embeddings(self) -> tuple[Embedding, ...]:
        return tuple(part for part in self.parts if isinstance(part, Embedding))

    @cached_property
    def num_layers(self) -> int:
        """Blocks that a pipeline can share out: transformer layers, and residual blocks of a UNet."""
        return sum(part.count for part in self.parts if part.starts)

    @cached_property
    def width(self) -> int:
        """Of the stream of the last layers: what the output matrix reads."""
        return self.layers[-1].width if self.layers else self.parts[-1].width

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the token table; 0 without."""
        return max((one.tokens for one in self.embeddings), default=0)

    @cached_property
    def tied(self) -> bool:
        """Whether an output matrix is the token table."""
        return any(head.tied for head in self.heads)

    @cached_property
    def norm(self) -> str:
        """Of the layers: "layer", "layer without bias" or "rms"."""
        return self.layers[-1].norm if self.layers else "none"

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer, 0 without."""
        return max((group.experts for group in self.layers), default=0)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the streams."""
        return tuple(stream.name for stream in self.streams)

    @cached_property
    def memo(self) -> dict[object, Any]:
        """What was worked out of this shape before: a search asks the same again and again."""
        return {}

    # ---- counts --------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(part.parameters for part in self.parts)

    @cached_property
    def embedding_parameters(self) -> int:
        """Tables of tokens, positions and types, and an output matrix that is not one of them."""
        untied = sum(h.outputs * h.width for h in self.heads if not h.tied and not h.per_row)
        return sum(one.tables for one in self.embeddings) + untied

    @cached_property
    def active_parameters(self) -> int:
        """Those that a token meets: all but the experts it is not sent to."""
        idle = sum(
            g.count * (g.experts - g.experts_per_token) * g.experts_on() // g.experts
            for g in self.layers
            if g.experts
        )
        return self.parameters - idle

    # ---- positions -----------------------------------------------------------------------------------------

    def lengths(self, seq_len: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Positions of a row in each stream.

        seq_len: one number for all streams that are not fixed, or one for each by name (T5: input, output).
        Raises ValueError for a stream without a length, and for more tokens than the model has positions.
        """
        given = dict(seq_len) if isinstance(seq_len, Mapping) else {}
        free = [stream.name for stream in self.streams if not stream.fixed]
        if unknown := sorted(set(given) - set(free)):
            raise ValueError(f"seq_len names {unknown}; the streams of {self.name} with a length are {free}")
        found = {}
        for stream in self.streams:
            length = stream.length if stream.fixed else given.get(stream.name, stream.length)
            if not stream.fixed and seq_len is not None and not isinstance(seq_len, Mapping):
                length = seq_len
            if length is None:
                raise ValueError(
                    f"seq_len={seq_len!r}: say how many tokens a row has"
                    + (
                        f", such as seq_len={{{', '.join(f'{n!r}: 512' for n in free)}}}"
                        if len(free) > 1
                        else ""
                    )
                )
            found[stream.name] = whole(length, f"seq_len={length!r} ({stream.name})")
            if found[stream.name] > MOST:
                raise ValueError(f"seq_len={length}: more than {MOST} tokens in a row cannot be meant")
            if not stream.fixed and self.positions and found[stream.name] > self.positions:
                raise ValueError(
                    f"seq_len={length} is longer than the {self.positions} positions of {self.name}; shorten "
                    "the rows, or give the shape more (max_positions=, positions=)"
                )
        return found

    def tokens(self, seq_len: int | Mapping[str, int] | None = None) -> int:
        """What counts as the tokens of a row: those of all streams of text that are learned from or read.

        For an encoder and a decoder together, both; of a UNet or an image tower, the picture's own positions.
        """
        lengths = self.lengths(seq_len)
        free = [stream.name for stream in self.streams if not stream.fixed]
        main = free if self.family != "UNet" and free else [self.streams[0].name]
        return sum(lengths[name] for name in main)
