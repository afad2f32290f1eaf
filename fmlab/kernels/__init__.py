"""Kernels: what runs on the chip, written so that it can be read, run anywhere, and its bytes counted.

    fmlab.kernels.triton     tiled kernels in Triton: compiled for a GPU, interpreted on a CPU
    fmlab.kernels.tiles      a tile machine like a NeuronCore: engines, on-chip memories, DMA

Importing this package imports neither.
"""
