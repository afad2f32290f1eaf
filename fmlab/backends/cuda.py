"""NVIDIA GPUs, and AMD GPUs through torch's ROCm build, which uses the same names."""

import torch

from fmlab.backends.base import Backend


class CUDA(Backend):
    """One process drives one GPU: number `index` of the host."""

    name = "cuda"
    distributed_backend = "nccl"
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)

    @classmethod
    def is_available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def create(cls, variant: str | None, index: int) -> "CUDA":
        count = torch.cuda.device_count()
        if index >= count:
            raise ValueError(
                f"this process wants GPU {index}, but the host has {count}: start at most {count} ranks"
            )
        return cls(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)

    def memory_stats(self) -> dict[str, int]:
        """Bytes that the allocator has handed out, now and at the highest, and the memory of the GPU."""
        return {
            "current": torch.cuda.memory_allocated(self.device),
            "peak": torch.cuda.max_memory_allocated(self.device),
            "total": torch.cuda.get_device_properties(self.device).total_memory,
        }


BACKEND = CUDA
