"""The device "sim": the CPU's numbers, torch's manners, and a memory that is counted to the byte."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fmlab import Ranks


def trained(device: str, precision: str, dropout: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    from fmlab.backends.moving import move_module
    from fmlab.models import GPT

    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny", dropout=dropout, num_layers=2)
    move_module(model, lambda module: module.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(0, 4096, (2, 32)).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(ids, labels=ids).loss_sum / ids.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("precision", "execution"), [("fp32", "eager"), ("bf16", "compiled")])
def test_training_gives_the_cpus_bits(aside: Ranks, precision: str, execution: Any) -> None:
    def compare() -> None:
        from fmlab.sim import simulate

        simulate("h100", execution=execution)
        here, there = trained("cpu", precision, 0.1), trained("sim", precision, 0.1)
        assert here[0] == there[0]
        assert [name for name in here[1] if not torch.equal(here[1][name], there[1][name])] == []

    aside.run(compare)


def test_attention_differs_in_bf16_only_while_it_learns(aside: Ranks) -> None:
    def compare() -> None:  # the CPU has a path of its own, in fp32: fmlab.models.attention.core
        from fmlab.backends.moving import move_module
        from fmlab.models import GPT
        from fmlab.sim import simulate

        simulate("h100")
        torch.manual_seed(0)
        model = GPT.from_preset("gpt2-tiny", num_layers=2)
        ids = torch.randint(0, 4096, (2, 32))
        found: dict[tuple[str, bool], float] = {}
        for device in ("cpu", "sim"):
            move_module(model, lambda module, device=device: module.to(device))
            for learning in (False, True):
                with torch.set_grad_enabled(learning), torch.autocast(device, torch.bfloat16):
                    found[device, learning] = model(ids.to(device), labels=ids.to(device)).loss_sum.item()
        assert found["sim", False] == found["cpu", False] == found["sim", True]
        assert found["cpu", True] == pytest.approx(found["sim", True], rel=1e-3)

    aside.run(compare)


def test_other_peoples_models_give_the_cpus_bits(aside: Ranks) -> None:
    transformers = pytest.importorskip("transformers")

    def compare() -> None:
        from fmlab.models import UNet
        from fmlab.sim import simulate

        simulate("h100")
        shape = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=99, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        found: dict[str, Any] = {}
        for device in ("cpu", "sim"):
            torch.manual_seed(0)
            gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).to(device)
            gpt.tie_weights()
            ids = torch.arange(20).view(2, 10).to(device)
            optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
            for _ in range(2):
                loss = gpt(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
            written = gpt.generate(ids[:, :3], max_new_tokens=3, do_sample=False, pad_token_id=0)
            unet = UNet.from_preset("sd-1.5", channels=(32, 32, 32, 32)).to(device)
            g = torch.Generator().manual_seed(1)
            latent, text = torch.randn(1, 4, 16, 16, generator=g), torch.randn(1, 7, 768, generator=g)
            out = unet(latent.to(device), torch.tensor([5], device=device), text.to(device)).sample
            out.square().sum().backward()
            gradients = [p.grad.norm().item() for p in unet.parameters()]
            found[device] = (loss.item(), written.tolist(), out.tolist(), gradients)
        assert found["cpu"] == found["sim"]

    aside.run(compare)


def test_optimizers_of_every_kind_give_the_cpus_bits(aside: Ranks) -> None:
    def compare() -> None:
        from fmlab.sim import simulate

        simulate("h100")
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
                found = []
                for device in ("cpu", "sim"):
                    torch.manual_seed(0)
                    layer = nn.Linear(5, 5).to(device)
                    optimizer = kind(layer.parameters(), lr=0.1, **how)
                    for _ in range(2):
                        layer(torch.ones(2, 5, device=device)).sum().backward()
                        optimizer.step()
                    found.append(layer.weight.tolist())
                assert found[0] == found[1], (kind, how)

    aside.run(compare)


def test_recurrent_layers_dropout_and_recomputation_run(aside: Ranks) -> None:
    def compare() -> None:
        from torch.utils.checkpoint import checkpoint

        from fmlab.sim import simulate

        simulate("h100")
        for kind in (nn.LSTM, nn.GRU):
            found = []
            for device in ("cpu", "sim"):
                torch.manual_seed(0)
                layer = kind(3, 4).to(device)
                layer(torch.ones(5, 2, 3, device=device))[0].square().sum().backward()
                found.append(torch.cat([p.grad.cpu().flatten() for p in layer.parameters()]))
            torch.testing.assert_close(*found)
        block = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 1)).to("sim")
        x = torch.ones(8, 5, device="sim", requires_grad=True)
        torch.manual_seed(3)
        checkpoint(block, x, use_reentrant=False).sum().backward()
        again, x.grad = x.grad, None
        torch.manual_seed(3)
        block(x).sum().backward()
        assert torch.equal(again, x.grad)

    aside.run(compare)


def test_moves_copies_and_files_keep_numbers_kinds_and_ties(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.backends.moving import move_module, tie_groups
        from fmlab.sim import simulate

        chip = simulate("h100")[0]
        layer = nn.Linear(5, 5).to("sim")
        weight = layer.weight
        twin = copy.deepcopy(layer)
        assert isinstance(twin.weight, nn.Parameter)
        assert torch.equal(twin.weight, weight)
        assert chip.memory.live == 2 * (25 + 5) * 4
        assert chip.memory.lines["parameters"] == chip.memory.live
        layer.to(torch.bfloat16)
        assert layer.weight is weight
        assert weight.raw.dtype == weight.dtype == torch.bfloat16
        assert chip.memory.live == (2 + 4) * 30

        file = io.BytesIO()
        torch.save(twin.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        assert saved["weight"].device.type == "cpu"
        twin.load_state_dict(saved)
        file.seek(0)
        with pytest.raises(ValueError, match="load with map_location='cpu'"):
            torch.load(file, map_location="sim")
        assert isinstance(pickle.loads(pickle.dumps(twin)).bias, nn.Parameter)
        twin.to("cpu")
        del layer, weight
        assert chip.memory.live == 0

        tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        tied[1].weight = tied[0].weight
        move_module(tied, lambda module: module.to("sim"))
        assert tie_groups(tied) == [["0.weight", "1.weight"]]
        from fmlab import storage

        assert tied[0].weight.data_ptr() != torch.ones(4, 3, device="sim").data_ptr()
        assert storage is not None

    aside.run(check)


def test_views_share_memory_and_resizing_is_counted(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.sim import simulate

        chip = simulate("h100")[0]
        x = torch.zeros(4, 6, device="sim")
        views = [x.t(), x[1:], x.view(-1), x.expand(3, 4, 6), x.detach(), *x.split(2)]
        assert chip.memory.live == 96
        x.t_()
        x.unsqueeze_(0).squeeze_(0)
        assert x.shape == x.raw.shape == (6, 4)
        views[2].add_(1)
        assert x.sum().item() == 24
        storage = x.untyped_storage()
        storage.resize_(0)
        assert chip.memory.live == 0
        storage.resize_(96)
        assert (chip.memory.live, chip.memory.peak) == (96, 100)
        x.resize_(2, 24)
        assert (tuple(x.shape), chip.memory.live) == ((2, 24), 192)
        assert torch.sim.memory_allocated() == 192

    aside.run(check)


def test_lazy_conjugates_are_resolved_as_on_the_cpu(aside: Ranks) -> None:
    """A product of complex tensors, as in rotary positions by complex numbers, conjugates in its backward."""

    def check() -> None:
        from fmlab.sim import simulate

        simulate("h100")
        found = []
        for device in ("cpu", "sim"):
            x = torch.arange(8.0).reshape(4, 2).to(device).requires_grad_()
            turn = torch.polar(torch.ones(4), torch.arange(4.0)).to(device)
            turned = torch.view_as_real(torch.view_as_complex(x) * turn)
            turned.pow(3).sum().backward()
            lazy = torch.view_as_complex(x.detach()).conj()
            assert lazy.is_conj()
            found.append([turned, x.grad, lazy * 1, lazy.imag, lazy.resolve_conj()])
        assert all(torch.equal(a, b.cpu()) for a, b in zip(*found, strict=True))

    aside.run(check)


def test_attention_with_a_learned_bias_gives_the_cpus_bits(aside: Ranks) -> None:
    """As in T5: the CPU's fused attention has no gradient for a mask."""

    def check() -> None:
        from fmlab.sim import simulate

        simulate("h100")
        found = []
        for device in ("cpu", "sim"):
            torch.manual_seed(0)
            tensors = [torch.randn(1, 2, 5, 8).to(device).requires_grad_() for _ in "qkv"]
            bias = torch.randn(1, 2, 5, 5).to(device).requires_grad_()
            out = nn.functional.scaled_dot_product_attention(*tensors, attn_mask=bias)
            out.square().sum().backward()
            found.append([out, bias.grad, *(x.grad for x in tensors)])
        assert all(torch.equal(a, b.cpu()) for a, b in zip(*found, strict=True))

    aside.run(check)


def test_torchs_manners(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.sim import simulate

        simulate("h100")
        simulate("trn2", first=1)
        one, two = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
        same = "Expected all tensors to be on the same device, but found at least two devices, sim:"
        for other, name in ((torch.ones(3), "cpu"), (two, "sim:1")):
            with pytest.raises(RuntimeError, match=f"{same}0 and {name}!"):
                one + other
        assert (one + torch.tensor(2.0)).tolist() == [3, 3, 3]
        assert one[torch.tensor([0, 2])].tolist() == [1, 1]
        with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
            one.numpy()
        with pytest.raises(
            RuntimeError, match=r"no simulated chip at sim:5; attached: sim:0 .*sim:1 .*Train"
        ):
            torch.zeros(2, device="sim:5")
        layer = nn.Linear(3, 2).to("sim:1")
        layer(two).sum().backward()
        assert layer.weight.grad.device == torch.device("sim:1")
        assert repr(one) == "tensor([1., 1., 1.], device='sim:0')"
        assert f"{one.sum():.1f}" == "3.0"
        with torch.sim.device(1):
            assert torch.zeros(2, device="sim").device.index == 1
        with torch.device("sim:1"):
            assert nn.Linear(2, 2).weight.device.index == 1
        assert one.to("sim:1").device.index == 1
        with torch.inference_mode():
            nn.TransformerEncoderLayer(8, 2, batch_first=True).to("sim").eval()(
                torch.ones(1, 3, 8, device="sim")
            )

    aside.run(check)


def test_host_reads_are_counted_and_streams_overlap(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.sim import record, simulate

        chip = simulate("h100")[0]
        x = torch.ones(1024, 1024, device="sim")
        chip.reset()
        side, before, after = torch.sim.Stream(), torch.sim.Event(), torch.sim.Event()
        before.record()
        with record() as trace:
            x @ x
            with torch.sim.stream(side):
                x @ x
            torch.sim.current_stream().wait_stream(side)
            x + x
        after.record()
        first, second, third = trace
        assert first.start == second.start == 0
        assert third.start == first.end
        assert third.after == (1,)
        assert before.elapsed_time(after) == pytest.approx(1e3 * (first.seconds + third.seconds))
        assert float(x.sum()) == 2**20
        assert chip.totals.host_reads == {"aten::item": 1}
        assert x[x > 2].numel() == 0
        assert chip.totals.host_reads["aten::index"] == 1

    aside.run(check)


def test_a_batch_that_does_not_fit_names_line_tensors_and_remedy(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.sim import simulate

        simulate("h100", memory_bytes=1 << 20)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.wide = nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for _ in range(9):
                    x = self.wide(x).relu()
                return x

        net = Net().to("sim")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            net(torch.ones(500, 64, device="sim"))
        error: Any = caught.value
        assert error.line == "activations"
        assert error.lines["parameters"] == 65 * 64 * 4
        for words in ("relu in 'Net'", "500x64 float32", "smaller batch", "125.00 KiB", "1.00 MiB"):
            assert words in str(error), words
        simulate("h100", first=3, memory_bytes=1 << 20)
        with pytest.raises(torch.OutOfMemoryError, match="largest line is parameters: take a smaller model"):
            nn.ModuleList(nn.Linear(400, 400) for _ in range(2)).to("sim:3")
        with pytest.raises(torch.OutOfMemoryError, match="This tensor alone is larger than the memory"):
            torch.empty(1 << 20, device="sim:3")

    aside.run(check)


def test_a_dry_run_has_the_true_memory_and_no_numbers(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.models import GPT
        from fmlab.sim import simulate

        chip = simulate("a100-80gb", dry=True, unlimited=True)[0]
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("sim"):
            model = GPT.from_preset("gpt3-175b", num_layers=2)
        torch.set_default_dtype(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(1, 128, dtype=torch.long, device="sim")
        loss = model(ids, labels=ids).loss_sum
        loss.backward()
        optimizer.step()
        size = 2 * sum(p.numel() for p in model.parameters())
        lines = chip.memory.lines
        steps = 4 * len(list(model.parameters()))
        assert lines["parameters"] == lines["gradients"] == size
        assert lines["optimizer states"] == 2 * size + steps
        assert chip.memory.capacity is None
        assert loss.item() == 1.0
        with pytest.raises(RuntimeError, match="a dry run has shapes, not numbers"):
            loss.cpu()

    aside.run(check)


def test_a_place_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fmlab.backends import available_backends, get_backend
    from fmlab.sim import simulate

    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "neuron")
    assert "sim" not in available_backends()
    with pytest.raises(RuntimeError, match="room for one device from outside, and this process has 'neuron'"):
        simulate("h100")
    with pytest.raises(ValueError, match="this process has 'neuron' there already"):
        get_backend("sim:h100")
