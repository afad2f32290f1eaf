"""NVIDIA GPUs, and AMD GPUs through torch's ROCm build, which uses the same names."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fmlab.backends.base import Backend, MatmulPrecision


class CUDA(Backend):
    """One process drives one GPU: number `index` of the host."""

    name = "cuda"
    # nccl stands for RCCL on ROCm; gloo carries what lies in the host's memory (offloaded states)
    distributed_backend = "cpu:gloo,cuda:nccl"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def why_absent(cls) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is a build without GPUs; install one for CUDA or ROCm"
        return "torch finds no GPU: look at `nvidia-smi` (or `rocm-smi`) and CUDA_VISIBLE_DEVICES"

    @classmethod
    def create(cls, variant: str | None, index: int) -> "CUDA":
        count = torch.cuda.device_count()
        if index >= count:
            raise ValueError(
                f"this process wants GPU {index}, but the host has {count}: start at most {count} ranks"
            )
        return cls(index)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def describe(self) -> str:
        """The GPU, its memory, and how it multiplies float32 matrices."""
        properties = torch.cuda.get_device_properties(self.device)
        level = torch.get_float32_matmul_precision()
        how = "float32" if level == "highest" else "TF32 or fewer bits"
        return (
            f"{properties.name} ({self.device}), {properties.total_memory / 2**30:.1f} GiB; "
            f"float32 matrices are multiplied in {how} (precision {level!r})"
        )

    # region order of work
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def stream(self) -> torch.cuda.Stream:
        """A new stream; its first work does not wait for what the current stream still has to do."""
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    # endregion

    # region memory
    def memory_stats(self) -> dict[str, int]:
        """Bytes that the allocator has handed out, now and at the highest, and the memory of the GPU.

        "reserved" is what it holds of the GPU, free blocks included.
        """
        return {
            "current": torch.cuda.memory_allocated(self.device),
            "peak": torch.cuda.max_memory_allocated(self.device),
            "total": torch.cuda.get_device_properties(self.device).total_memory,
            "reserved": torch.cuda.memory_reserved(self.device),
        }

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory_summary(self) -> str:
        return torch.cuda.memory_summary(self.device, abbreviated=True)

    # endregion

    # region numbers
    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)

    def set_matmul_precision(self, level: MatmulPrecision) -> None:
        """ "highest" keeps float32 (torch's default); "high" and "medium" allow TF32 tensor cores: 10 bits of
        mantissa in place of 23, several times as fast.
        """
        torch.set_float32_matmul_precision(level)

    # endregion

    def distributed_options(self) -> dict[str, Any]:
        """The device, so that NCCL connects at once and a barrier knows which GPU is meant."""
        return {**super().distributed_options(), "device_id": self.device}


BACKEND = CUDA
