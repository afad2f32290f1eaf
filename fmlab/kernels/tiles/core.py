"""The two cores that the machine imitates, as figures with unit, convention and source.

    CORES["v2"]   NeuronCore-v2: a Trainium or Inferentia2 chip has two
    CORES["v3"]   NeuronCore-v3: a Trainium2 chip has eight

Nothing of this was measured by us. What no source gives and the model needs is marked "assumption".
"""

from dataclasses import dataclass
from types import MappingProxyType

PARTITIONS = 128  # of both SBUF and PSUM: the rows that all engines work on side by side
BANKS = 8  # of a PSUM partition
BANK_BYTES = 2048  # of one bank in one partition: 512 numbers of fp32
STATIONARY = 128  # columns of the systolic array: the most a stationary tile has in its free dimension
MOVING = 512  # the most a moving tile has: what one PSUM bank takes
FREE_SBUF, FREE_PSUM = 65536, 4096  # elements in the free dimension of one vector or scalar instruction

ARCH2 = "AWS Neuron documentation, Trainium/Inferentia2 Architecture Guide for NKI"
ARCH3 = "AWS Neuron documentation, Trainium2 Architecture Guide for NKI"
ISA = "AWS Neuron documentation 2.21, nki.isa, estimated instruction cost"
DMA = "AWS Neuron documentation, Guideline to Avoid Under-Utilizing DMA Bandwidth (2026-03)"
DMA_OVERVIEW = "AWS Neuron documentation, Introduction to Direct Memory Access with NKI"


@dataclass(frozen=True)
class Figure:
    """One number: what it counts, and where it was read."""

    value: float
    unit: str
    convention: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.convention}; {self.source})"


@dataclass(frozen=True)
class Core:
    """One core. Clocks in GHz; memory in bytes of one partition; `figures` says where each comes from."""

    name: str
    title: str
    figures: MappingProxyType[str, Figure]

    def _value(self, key: str) -> float:
        return self.figures[key].value

    @property
    def sbuf_partition(self) -> int:
        """Bytes of SBUF in one partition."""
        return int(self._value("SBUF partition")) * 1024

    def clock(self, engine: str) -> float:
        """Cycles a second of tensor, vector, scalar or gpsimd."""
        return self._value(f"{engine} clock") * 1e9

    @property
    def dma_engines(self) -> int:
        return int(self._value("DMA engines"))

    @property
    def dma_rate(self) -> float:
        """Bytes a second of one DMA engine."""
        return self._value("DMA rate") * 1e9

    @property
    def dma_latency(self) -> float:
        """Seconds from the moment that a transfer may start until its first byte moves."""
        return self._value("DMA latency") * 1e-9

    @property
    def bandwidth(self) -> float:
        """Bytes a second of all DMA engines together: the most that flows between HBM and SBUF."""
        return self.dma_engines * self.dma_rate

    def peak(self, itemsize: int = 2) -> float:
        """FLOPs a second of the systolic array, 2 for a multiply-add, for 2-byte or 4-byte (fp32)
        operands."""
        return 2 * PARTITIONS * STATIONARY * self.clock("tensor") / (4 if itemsize == 4 else 1)

    @property
    def shared_ports(self) -> bool:
        """Whether vector and gpsimd take turns at SBUF, and vector and scalar at PSUM (v2 only)."""
        return self.name == "v2"

    @property
    def fast_16_bit(self) -> bool:
        """Whether the vector engine is 2 to 4 times faster on 16-bit tiles (v3 only)."""
        return self.name == "v3"

    def __str__(self) -> str:
        lines = [f"{self.title} (modelled; quoted figures)"]
        return "\n".join(lines + [f"  {key}: {figure}" for key, figure in self.figures.items()])


def _core(
    name: str, title: str, arch: str, sbuf: int, clocks: tuple[float, float, float, float], rate: float
) -> Core:
    tensor, vector, scalar, gpsimd = clocks
    bound = "time of so many bytes, added to each contiguous piece of a transfer"
    figures = {
        "SBUF partition": Figure(sbuf, "KiB", "one of 128 partitions", arch),
        "PSUM partition": Figure(16, "KiB", "one of 128 partitions: 8 banks of 2 KiB", arch),
        "tensor clock": Figure(tensor, "GHz", "128 x 128 systolic array", arch),
        "vector clock": Figure(vector, "GHz", "128 lanes", arch),
        "scalar clock": Figure(scalar, "GHz", "128 lanes", arch),
        "gpsimd clock": Figure(gpsimd, "GHz", "128 lanes in 8 processors", arch),
        "shortest instruction": Figure(64, "cycles", "between two starts on one engine", ISA),
        "result latency": Figure(100, "cycles", "more when the next one needs the result; not tensor", ARCH2),
        "tensor latency": Figure(64, "cycles", "as above; start-up of a multiplication, assumption", ARCH2),
        "DMA engines": Figure(16, "engines", "of one core; each serves 8 partitions", DMA_OVERVIEW),
        "DMA rate": Figure(rate, "GB/s", "one engine, sustained; its theoretical rate is 27.2", DMA),
        "DMA latency": Figure(1300, "ns", "from semaphore to start, each transfer", DMA),
        "DMA piece": Figure(128, "B", bound, "assumption, to fit the words of: " + DMA),
    }
    return Core(name, title, MappingProxyType(figures))


CORES = MappingProxyType(
    {
        "v2": _core("v2", "NeuronCore-v2 (Trainium, Inferentia2)", ARCH2, 192, (2.8, 1.12, 1.4, 1.4), 17),
        "v3": _core("v3", "NeuronCore-v3 (Trainium2)", ARCH3, 224, (2.4, 0.96, 1.2, 1.2), 23),
    }
)


def core(name: str) -> Core:
    """The core of this name: "v2" or "v3". ValueError for another."""
    if name not in CORES:
        raise ValueError(f"core={name!r} is unknown; choose from {', '.join(CORES)}")
    return CORES[name]
