"""Every kernel compiles for NVIDIA's and AMD's chips, without one of them."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
from fmlab.kernels import triton as ft
from fmlab.kernels.triton.counting import Launch

PRODUCTS = {"matmul_kernel", "attention_kernel", "attention_keys_kernel", "attention_queries_kernel"}


def every_launch() -> dict[str, Launch]:
    """One launch of each kernel, by name, on tiles of the size that a GPU would get."""
    half = {"dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.ones(1, heads, 16, 64, **half) for heads in (2, 1, 1))
    x, weight = torch.ones(2, 64, **half), torch.ones(64, **half)
    plain = torch.ones(16)
    with ft.count_bytes() as count:
        results = [
            ft.matmul(torch.ones(16, 16, **half), torch.ones(16, 16, **half)),
            ft.softmax(x),
            ft.layer_norm(x, weight, weight),
            ft.rms_norm(x, weight),
            ft.bias_gelu(x, weight),
            ft.bias_gelu(x, weight, "tanh"),
            ft.cross_entropy(x, torch.zeros(2, dtype=torch.int64)),
            ft.attention(q, k, v, causal=True),
        ]
        sum(out.float().sum() for out in results).backward()
        ft.adamw_step(plain, plain, plain.clone(), plain.clone(), 1)
    return {launch.kernel.__name__: launch for launch in count.launches}


def test_the_list_is_whole() -> None:
    names = set()
    for file in Path(ft.__file__).parent.glob("*.py"):
        lines = file.read_text().splitlines()
        for line, following in pairwise(lines):
            if line == "@kernel":
                names.add(following.removeprefix("def ").split("(")[0])
    assert len(names) == 16
    assert set(every_launch()) == names


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
def test_every_kernel_compiles_for(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in every_launch().values():
        made = ft.compile_for(launch, target)
        assert made.size > 500
        assert 1 <= made.registers <= 512
        if made.kernel in PRODUCTS:
            assert made.shared > 0
            product = "mfma" if target == "gfx942" else "mma"
            assert product in made.assembly, "bf16 products belong on the matrix unit"


def test_unknown_targets_are_refused() -> None:
    with ft.count_bytes() as count:
        ft.softmax(torch.ones(1, 4))
    with pytest.raises(ValueError, match="sm_80, sm_90a, gfx942"):
        ft.compile_for(count.launches[0], "tpu")
