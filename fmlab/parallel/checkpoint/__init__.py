"""Checkpoints that know nothing of the layout that wrote them.

Two formats, told apart when they are read; either loads into any engine, layout and number of ranks:

    model.safetensors, optimizer.safetensors    whole tensors, from engines that hold whole tensors
    .metadata, __0_0.distcp, __1_0.distcp, ...  pieces, each rank its own, from engines that do not
                                                (torch.distributed.checkpoint's files)

pieces.py   where a rank's piece lies in the whole, from the ledger alone
planner.py  what torch.distributed.checkpoint asks about pieces
named.py    an engine's state as named pieces
write.py    every rank writes its own, whole or not at all
read.py     from any checkpoint into any engine, or into a plain model to export
"""

from fmlab.parallel.checkpoint.pieces import Box, Piece, boxes
from fmlab.parallel.checkpoint.read import load, load_model, open_checkpoint
from fmlab.parallel.checkpoint.write import save

__all__ = ["Box", "Piece", "boxes", "load", "load_model", "open_checkpoint", "save"]
