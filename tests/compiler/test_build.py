"""Compilers and folders that fail, many threads, and what generated code does to memory and to 16 bits."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fmlab.compiler import CompiledAdamW, NoCompiler, compile, fusing_passes
from fmlab.compiler.codegen import build, compiler

SOURCE = 'extern "C" int answer() { return 42; }'


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def here() -> bool:
    try:
        compiler()
    except NoCompiler:
        return False
    return True


needs_compiler = pytest.mark.skipif(not here(), reason="no C++ compiler")

#: What stands in for a compiler: it gives nothing, fails, is no program, or makes no library.
BROKEN = {
    "writes nothing": "#!/bin/sh\nexit 0\n",
    "fails": "#!/bin/sh\necho no space left >&2\nexit 1\n",
    "is no program": "\0\1\2",
    "writes rubbish": '#!/bin/sh\nfor last; do :; done\necho rubbish > "$last"\n',
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_compiler_that_fails_leaves_torchs_operators_in_the_groups(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", BROKEN[case]))
    x = torch.randn(3, 5, requires_grad=True)
    compiled = compile(lambda x: (x.exp() * 2).softmax(-1), x, passes=fusing_passes(tmp_path / "built"))
    refused = [why for _, report in compiled.program.reports for why in report.refused]
    assert any("cxx" in why for why in refused)
    torch.testing.assert_close(compiled(x), (x.exp() * 2).softmax(-1))


@needs_compiler
def test_a_folder_that_cannot_be_used_is_replaced_and_a_compiler_may_have_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{compiler()[0]} -O1")
    (tmp_path / "file").write_text("not a folder")
    assert build(SOURCE, tmp_path / "file" / "below").answer() == 42
    assert build(SOURCE, tmp_path / "folder").answer() == 42
    (library,) = (tmp_path / "folder").glob("*.so")
    other = tmp_path / "spoiled"
    other.mkdir()
    (other / library.name).write_bytes(b"")
    assert build(SOURCE, other).answer() == 42


def test_threads_that_capture_at_once_do_it_one_after_the_other() -> None:
    found: list[object] = []

    def work(factor: int) -> None:
        x = torch.randn(3, requires_grad=True)
        try:
            got = compile(lambda x: (x * factor).exp().sum(), x, passes=[])(x)
            found.append(torch.equal(got, (x * factor).exp().sum()))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_comparison_with_a_number_is_done_in_the_dtype_of_the_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.1, 0.2, 0.3, -0.1]]).to(dtype)  # 0.1 of 16 bits is not 0.1

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        parts = (y <= 0.1, y < 0.1, y >= 0.1, y > 0.1, y == 0.1, y != 0.1)
        return tuple(torch.where(part, y, y * 2) for part in parts)

    compiled = compile(fn, x, passes=fusing_passes(), backward=False)
    assert sum(report.made["kernel"] for _, report in compiled.program.reports) == 1
    for got, want in zip(compiled(x), fn(x), strict=True):
        assert torch.equal(got, want)


def _steps(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], gradient: Tensor) -> Tensor:
    p = nn.Parameter(torch.ones_like(gradient).contiguous())
    optimizer = make([p])
    for _ in range(2):
        p.grad = gradient
        optimizer.step()
    return p.detach()


def test_the_compiled_optimizer_takes_any_order_of_memory_and_no_other_rule() -> None:
    gradient = torch.randn(6, 4).T
    want, got = _steps(torch.optim.AdamW, gradient), _steps(CompiledAdamW, gradient)
    torch.testing.assert_close(got, want)
    p = nn.Parameter(torch.ones(3, 2))
    ours = CompiledAdamW([p])
    for rule in ("amsgrad", "maximize"):
        with pytest.raises(ValueError, match=f"has no {rule}"):
            ours.load_state_dict(torch.optim.AdamW([p], **{rule: True}).state_dict())
    with pytest.raises(ValueError, match="dense fp32 or fp64"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(3).half())]})
    assert len(ours.param_groups) == 1
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        CompiledAdamW(table.parameters()).step()


def test_a_backward_pass_that_needs_old_weights_notices_a_compiled_step() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    CompiledAdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
