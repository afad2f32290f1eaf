"""Compiling for TPUs ahead of time: the traced step is ours, number for number; the compiler's part needs the
extra tpu-aot, which no test installs.
"""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fmlab.backends.tpu_aot import TPUOutOfMemoryError, compile_for, results, trace_step
from fmlab.backends.tpu_aot.trace import AdamW, real_inputs
from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM
from fmlab.train.aot import AotCommand, headline, main, model_and_batch

needs_extra = pytest.mark.skipif(
    find_spec("libtpu") is None or find_spec("torchax") is None,
    reason="the extra tpu-aot is not installed (its licence is yours to accept)",
)


def loss(model, batch):
    term = CausalLM()(model, batch)["causal"]
    return term.sum / term.count


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=97, max_positions=16, num_layers=2, hidden_size=32, num_heads=2))
    return model, {"input_ids": torch.randint(0, 97, (3, 16))}


@pytest.fixture(scope="module")
def traced(small):
    return trace_step(*small, loss, precision="fp32")


def test_the_traced_step_computes_what_torch_computes(small, traced):
    model, batch = small
    results = traced.graph(*real_inputs(traced, model, batch))
    value = loss(model, batch)
    value.backward()
    names = [name for name, _ in model.named_parameters()]
    assert torch.allclose(results[0], value.detach(), rtol=1e-6)
    n = len(names)
    for first, parameter in zip(results[1 + n : 1 + 2 * n], model.parameters(), strict=True):
        assert torch.allclose(first / 0.1, parameter.grad, atol=1e-6)  # the first moment is a tenth of it
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)).step()
    # Where a gradient is rounding alone, AdamW's first step is its sign.
    for new, parameter in zip(results[1 : 1 + n], model.parameters(), strict=True):
        sure = parameter.grad.abs() > 1e-6
        assert torch.allclose(new[sure], parameter[sure], atol=2e-6)
    assert results[-1] == 1


def test_tied_weights_are_one_input_and_the_model_is_left_alone(small, traced):
    model, _ = small
    assert traced.parameters == sum(p.numel() for p in model.parameters())
    assert traced.state == 3 * len(list(model.parameters())) + 1
    assert traced.state_bytes == 12 * traced.parameters + 4
    assert not any(node.target is torch.ops.aten.add_.Tensor for node in traced.graph.graph.nodes)
    assert traced.operators > 200


@pytest.mark.slow
def test_a_model_of_any_size_is_traced_without_its_numbers():
    step = trace_step(*model_and_batch(AotCommand("gpt2-tiny", batch=4096, seq_len=256)))
    assert step.parameters == 1_350_400
    assert all(tensor.device.type == "cpu" for tensor in step.inputs), "fake: no memory is behind them"


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.weight.sum() * x.sum().item()


def test_bad_input_is_refused_before_anything_is_loaded(traced):
    with pytest.raises(
        ValueError, match=r"Google Cloud Platform Terms of Service.*accept_libtpu_licence=True"
    ):
        compile_for(traced, "v5e:2x2")
    with pytest.raises(ValueError, match=r"reads a number .*fmlab preflight"):
        trace_step(Reading(), {"x": torch.ones(2)}, lambda model, batch: model(**batch))
    with pytest.raises(ValueError, match="fp32 or bf16"):
        trace_step(Reading(), {}, lambda model, batch: None, precision="fp8")
    with pytest.raises(ValueError, match="causal and masked"):
        model_and_batch(AotCommand("t5-tiny"))
    with pytest.raises(ValueError, match="longer than the model"):
        model_and_batch(AotCommand("gpt2-tiny", seq_len=4096))
    if find_spec("libtpu") is None:
        with pytest.raises(ImportError, match=r"pip install .*\[tpu-aot\]"):
            compile_for(traced, "v5e:2x2", accept_libtpu_licence=True)


def test_the_compilers_refusal_is_told_in_its_words():
    text = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required "
        "for HLO temporaries (58.25G) exceeds available HBM (15.75G). HLO module: jit_function. And so on."
    )
    assert headline(TPUOutOfMemoryError(text)) == (
        "Ran out of memory on HBM, the total memory required for HLO temporaries (58.25G) exceeds available "
        "HBM (15.75G)"
    )
    older = (
        "Ran out of memory in memory space hbm. Used 39.1G of 15.75G hbm. Exceeded hbm capacity by 23.4G.\n\n"
    )
    assert "Used 39.1G of 15.75G hbm" in headline(TPUOutOfMemoryError(older))


def test_the_committed_results_say_how_they_were_made():
    rows = results()
    assert {row["model"] for row in rows} >= {"gpt2-tiny"}
    for row in rows:
        assert row["command"].startswith("fmlab aot")
        assert "libtpu" in row["versions"]
        assert row["date"]
        if row["outcome"] == "compiled":
            parts = [int(row[name]) for name in ("arguments", "outputs", "temporaries", "code")]
            assert int(row["hbm_bytes"]) == sum(parts) - int(row["aliased"])
    assert any("HBM" in row["outcome"] for row in rows), "one that does not fit"


@pytest.mark.tpu_aot
@needs_extra
def test_the_lowered_step_computes_the_same_in_jax_and_compiles_for_a_tpu(small, traced):
    from fmlab.backends.tpu_aot.lowering import load_jax, lowered

    jax = load_jax()
    values = real_inputs(traced, *small)
    torch_results = traced.graph(*values)
    arrays = [jax.numpy.asarray(value.numpy()) for value in values]
    jax_results = jax.jit(lowered(traced.graph))(*arrays)
    n = (traced.state - 1) // 3
    assert abs(float(jax_results[0]) - float(torch_results[0])) < 1e-5
    for mine, theirs in zip(torch_results[1 + n : 1 + 2 * n], jax_results[1 + n : 1 + 2 * n], strict=True):
        assert abs(mine.numpy() - theirs).max() < 1e-6
    compiled = compile_for(traced, "v5e:2x2", accept_libtpu_licence=True)
    assert compiled.arguments >= traced.state_bytes
    assert compiled.aliased >= traced.state_bytes - 4096, "the new state takes the old one's place"
    with pytest.raises(ValueError, match="does not compile for 'v9:1'"):
        compile_for(traced, "v9:1", accept_libtpu_licence=True)


def test_adamw_here_is_torchs():
    torch.manual_seed(0)
    weight = torch.randn(4, 3)
    mine, first, second = weight.clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    theirs = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for count in range(1, 6):
        theirs.grad = torch.randn(4, 3)
        mine, first, second = AdamW(lr=1e-2).update(mine, theirs.grad, first, second, torch.tensor(count))
        optimizer.step()
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_the_command_needs_the_licence():
    with pytest.raises(ValueError, match="accept-libtpu-licence"):
        main(["gpt2-tiny", "--batch", "2", "--seq-len", "16"])
