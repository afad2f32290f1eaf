"""Checkpoints that know nothing of the layout that wrote them.

Every file is a safetensors file with an entry in manifest.json; either form loads into any engine, layout and
number of ranks:

    model.safetensors, optimizer.safetensors     whole tensors, from engines that hold whole tensors
    part-0000.safetensors, part-0001..., ...     blocks of tensors, each rank its own, from engines that do
    not frozen.safetensors, frozen-0000..., ...      of either, what is not trained: linked from save to save

pieces.py    where a rank's piece lies in the whole, from the ledger alone
named.py     an engine's state as named pieces
snapshot.py  what this rank writes, taken at one moment; later written without a message to other ranks
write.py     every rank writes its own, whole or not at all
blocks.py    blocks out of files into pieces, whatever cut either
read.py      from any checkpoint into any engine, or into a plain model to export
"""

from fmlab.parallel.checkpoint.pieces import Box, Piece, boxes
from fmlab.parallel.checkpoint.read import load, load_model, open_checkpoint
from fmlab.parallel.checkpoint.snapshot import Snapshot, take
from fmlab.parallel.checkpoint.write import all_see, on_each, on_first, save

__all__ = [
    "Box",
    "Piece",
    "Snapshot",
    "all_see",
    "boxes",
    "load",
    "load_model",
    "on_each",
    "on_first",
    "open_checkpoint",
    "save",
    "take",
]
