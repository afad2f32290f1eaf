"""What torch.distributed.checkpoint has to know of our pieces.

It asks a planner which blocks of which tensors a rank writes or wants, works out which file holds what, and
hands over the data. Blocks of any shape may be written and others wanted: that is what makes a checkpoint
independent of the layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fmlab.parallel.checkpoint.pieces import Box, Piece


@dataclass(frozen=True)
class Planned:
    """A piece under the names by which torch.distributed.checkpoint asks for blocks."""

    piece: Piece

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        piece = self.piece
        properties = TensorProperties.create_from_tensor(piece.tensor)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(piece.shape)),
            )
            for box in piece.boxes
            if piece.writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.piece.boxes]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class SavePlanner(DefaultSavePlanner):
    """Writes the blocks of pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        piece: Piece = self.state_dict[index.fqn].piece
        return piece.at(tuple(index.offset or ())).detach().contiguous()


class LoadPlanner(DefaultLoadPlanner):
    """Reads into the blocks of pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn].piece
        return piece.at(tuple(index.offset or ()))
