"""DiT against diffusers' DiTTransformer2DModel, its published sizes, its plan, and what it refuses."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import check_plan
from fmlab.models.diffusion import DiT, DiTConfig
from fmlab.models.diffusion.dit import patch_positions
from fmlab.models.diffusion.dit_hf import to_hf_config, weights
from fmlab.models.diffusion.timestep import timestep_waves
from tests.models.reference import assert_same_gradients, copy_weights, roughen

SMALL = dict(num_layers=3, hidden_size=24, num_heads=2, in_channels=4, sample_size=8, num_classes=7)
AS_DIFFUSERS = dict(frequency_shift=1.0, embedder_per_layer=True, mlp_norm_eps=1e-5)
WITH_TEXT = dict(num_classes=None, text_size=20)


def small(**overrides: object) -> DiT:
    torch.manual_seed(0)
    model = DiT(DiTConfig(**(SMALL | overrides)))  # type: ignore[arg-type]
    roughen(model)
    return model


def twin_of(model: DiT) -> nn.Module:
    """diffusers' model with the weights of `model`; in eval mode, as it drops labels at random otherwise."""
    diffusers = pytest.importorskip("diffusers")
    twin = diffusers.DiTTransformer2DModel.from_config(to_hf_config(model.config))
    if model.config.embedder_per_layer:
        copy_weights(model, twin, weights(model.config))
    return twin.eval()


def batch(size: tuple[int, int] = (8, 8), text: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2, 4, *size, generator=generator)
    condition = {"class_labels": torch.tensor([2, 7])}  # a class, and none
    if text:
        condition = {"encoder_hidden_states": torch.randn(2, 5, 20, generator=generator)}
    return {"sample": sample, "timestep": torch.tensor([981, 3])} | condition


def in_diffusers_words(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"hidden_states" if name == "sample" else name: tensor for name, tensor in inputs.items()}


def test_published_shapes_have_the_published_sizes() -> None:
    """In millions: Peebles and Xie 2022, Table 4 (33, 130, 458, 675)."""
    with torch.device("meta"):
        counts = {name: DiT.from_preset(name).num_parameters() for name in DiT.PRESETS if "/" in name}
    exact = {"dit-s/2": 32_865_056, "dit-b/2": 130_315_808, "dit-l/2": 457_840_672, "dit-xl/2": 674_834_720}
    assert counts == exact
    assert [round(count / 1e6) for count in counts.values()] == [33, 130, 458, 675]


def test_output_loss_and_every_gradient_equal_diffusers() -> None:
    model = small(**AS_DIFFUSERS)
    twin = twin_of(model)
    out, twin_out = model(**batch()).sample, twin(**in_diffusers_words(batch())).sample
    torch.testing.assert_close(out, twin_out, rtol=0, atol=1e-5)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    loss, twin_loss = (nn.functional.mse_loss(side, noise) for side in (out, twin_out))
    assert abs(loss.item() - twin_loss.item()) < 1e-6 * twin_loss.item()
    loss.backward()
    twin_loss.backward()
    assert_same_gradients(model, twin, weights(model.config))


def test_shared_embedders_equal_equal_embedders_in_every_layer() -> None:
    """The paper shares one among the layers, diffusers has one in each; and its waves are not the paper's."""
    shared = small()
    apart = small(embedder_per_layer=True)
    names = {name for name, _ in shared.named_parameters()}
    for name, parameter in apart.named_parameters():
        source = name if name in names else "blocks.0.condition." + name.split(".condition.")[1]
        parameter.data.copy_(shared.get_parameter(source))
    torch.testing.assert_close(apart(**batch()).sample, shared(**batch()).sample)
    ours, theirs = (timestep_waves(torch.tensor([999.0]), 256, shift)[0, 127] for shift in (0.0, 1.0))
    assert abs(ours - torch.tensor(999.0 * 10000 ** (-127 / 128)).cos()) < 1e-6
    assert abs(theirs - torch.tensor(999.0 / 10000).cos()) < 1e-6


def test_positions_equal_diffusers_also_for_other_sizes() -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    for size in ((4, 4), (6, 3)):
        ours = patch_positions(*size, 24, 4, torch.device("cpu"))
        theirs = embeddings.get_2d_sincos_pos_embed(24, size, base_size=4)
        torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-6)


def test_pixels_come_back_where_they_were() -> None:
    """Neither square nor the trained size: the network as the identity."""
    model = small(hidden_size=16, out_channels=4, num_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # a patch's 4 channels of 2x2 pixels to 16 numbers, and back in the order row, column, channel
        model.blocks[0].patch.weight.copy_(torch.eye(16).view(16, 4, 2, 2))
        model.blocks[-1].pixels.weight.copy_(
            torch.eye(16).view(4, 2, 2, 16).permute(1, 2, 0, 3).reshape(16, 16)
        )
    inputs = batch(size=(6, 12))
    hidden = model.blocks[0](model.prepare(**inputs)).hidden
    want = nn.functional.layer_norm(hidden, (16,), eps=1e-6)  # what the last norm makes of it
    patches = want.view(2, 3, 6, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(2, 4, 6, 12)
    torch.testing.assert_close(model(**inputs).sample, patches)


@pytest.mark.parametrize("kind", ["class", "as diffusers", "text", "padded text", "nothing"])
def test_the_plan_holds(kind: str) -> None:
    settings = {"as diffusers": AS_DIFFUSERS, "nothing": dict(num_classes=None)}
    model = small(**(WITH_TEXT if "text" in kind else settings.get(kind, {})))
    inputs = batch(text="text" in kind)
    if kind == "padded text":
        inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    if kind == "nothing":
        del inputs["class_labels"]
    check_plan(model, inputs)


def test_text_is_looked_at_and_its_padding_is_not() -> None:
    model, inputs = small(**WITH_TEXT), batch(text=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    text = inputs["encoder_hidden_states"]
    padded = text.clone()
    padded[0, 3:] = 99.0
    out = model(**inputs, encoder_attention_mask=mask).sample
    masked = model(**inputs | {"encoder_hidden_states": padded}, encoder_attention_mask=mask).sample
    assert torch.equal(out, masked)
    changed = model(**inputs | {"encoder_hidden_states": text.roll(1, 0)}, encoder_attention_mask=mask).sample
    assert (out - changed).abs().max() > 1e-2


def test_diffusers_loads_what_we_save_and_back(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    for per_layer in (True, False):
        model = small(**AS_DIFFUSERS | {"embedder_per_layer": per_layer}).eval()
        folder = tmp_path / str(per_layer)
        model.save_pretrained(folder / "ours")
        theirs = diffusers.DiTTransformer2DModel
        twin, report = theirs.from_pretrained(folder / "ours", output_loading_info=True)
        assert not any(report.values()), report
        out = twin.eval()(**in_diffusers_words(batch())).sample
        torch.testing.assert_close(out, model(**batch()).sample, rtol=0, atol=1e-5)
        twin.save_pretrained(folder / "theirs")
        again = DiT.from_pretrained(folder / "theirs")
        assert again.config == DiTConfig(**(SMALL | AS_DIFFUSERS))
        torch.testing.assert_close(again(**batch()).sample, model(**batch()).sample, rtol=0, atol=1e-6)


def test_a_step_is_one_graph_and_runs_in_other_precisions() -> None:
    model = small(num_layers=1).double()
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in batch().items()}

    def loss(arguments: dict[str, Tensor]) -> Tensor:
        return model(**arguments).sample.square().mean()

    captured = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises at a graph break
    got, want = (torch.autograd.grad(f(inputs), list(model.parameters())) for f in (captured, loss))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    half, exact = copy.deepcopy(model).float(), model(**inputs).sample
    with torch.autocast("cpu", torch.bfloat16):
        assert (half(**batch()).sample - exact).norm() < 0.03 * exact.norm()


def test_a_new_model_gives_zeros() -> None:
    """adaLN-Zero: every layer starts as the identity, and the last matrix at zero."""
    model = DiT(DiTConfig(**SMALL))  # type: ignore[arg-type]
    state = model.prepare(**batch())
    first = model.blocks[0](state)
    assert torch.equal(model.blocks[1](first).hidden, first.hidden)
    assert not model(**batch()).sample.any()


MODEL, TEXT_MODEL = small(), small(**WITH_TEXT)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "side": (
        lambda: MODEL(**batch(size=(8, 7))),
        r"width of sample must be divisible by 2 \(patches of 2x2\)",
    ),
    "no class": (lambda: MODEL(**batch(text=True)), "this DiT needs class_labels"),
    "no text": (lambda: TEXT_MODEL(**batch()), "this DiT has no use for class_labels"),
    "label": (lambda: MODEL(**batch() | {"class_labels": torch.tensor([0, 8])}), r"got 0..8, legal is 0..7"),
    "labels": (lambda: MODEL(**batch() | {"class_labels": torch.tensor([0])}), r"must be \[2\], got \[1\]"),
    "text width": (
        lambda: TEXT_MODEL(**batch(text=True) | {"encoder_hidden_states": torch.zeros(2, 5, 24)}),
        r"must be \[2, 'tokens', 20\], got \[2, 5, 24\]",
    ),
    "both": (lambda: small(text_size=20), "not both"),
    "patches": (lambda: small(patch_size=3), "patch_size=3 does not divide sample_size=8"),
    "heads": (lambda: small(num_heads=5), "num_heads=5 does not divide"),
    "other numbers there": (lambda: to_hf_config(MODEL.config), "frequency_shift=1; this one has .*=0.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()
