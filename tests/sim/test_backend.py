"""`get_backend("sim:…")`: the protocol of a backend, training by the command line, and ranks over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fmlab import Ranks


def test_it_does_all_of_the_protocol(aside: Ranks) -> None:
    def check() -> None:
        from fmlab.backends import get_backend
        from fmlab.sim import simulate

        with pytest.raises(
            ValueError, match=r"unknown variant 'sim:h1000'.*sim:trn2.*did you mean sim:h100\?"
        ):
            get_backend("sim:h1000")
        backend: Any = get_backend("sim:trn2", 0)
        assert backend is not get_backend("sim:trn2", 0)
        assert backend.chip is get_backend("sim:trn2", 0).chip  # type: ignore[attr-defined]
        assert backend.static_shapes
        assert not get_backend("sim:h100", 1).static_shapes
        assert backend.device_count() >= 2
        assert "AWS Trainium2, simulated (compiled)" in backend.describe()
        backend.reset_peak_memory()
        before = backend.memory_stats()["current"]
        x = backend.to_device({"x": torch.ones(256, 4)})["x"]
        assert backend.memory_stats()["current"] == before + 4096
        assert backend.memory_stats()["total"] == 96 * 2**30
        assert backend.to_host(x).device.type == "cpu"
        clock = backend.modelled_seconds()
        with backend.autocast("bf16"):
            assert (x.t() @ x).dtype == torch.bfloat16
        with backend.on(backend.stream()):
            x + x
        backend.synchronize()
        assert backend.modelled_seconds() > clock
        backend.seed(3)
        drawn = torch.rand(2, device=backend.device).tolist()
        torch.manual_seed(3)
        assert drawn == torch.rand(2).tolist()

        simulate("h100", execution="eager")
        backend = get_backend("sim:h100", 0)
        step = backend.compile(lambda y: (y * 2 + 1).relu(), fullgraph=True)
        kernels = backend.chip.totals.kernels
        assert step(x).sum().item() == 3 * 1024
        assert backend.chip.totals.kernels - kernels == 2  # the step, and the sum outside
        with pytest.raises(RuntimeError, match="the host reads a number inside a step"):
            backend.compile(lambda y: y.sum().item(), fullgraph=True)(x)
        with pytest.raises(ValueError, match="no options, got mode"):
            backend.compile(step, options={"mode": 1})

    aside.run(check)


def test_the_command_line_trains_on_a_chip(aside: Ranks, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 400)

    def check() -> None:
        import io
        from contextlib import redirect_stdout

        from fmlab.sim import simulate
        from fmlab.train.__main__ import main

        words = ["gpt2-tiny", "--corpus", str(tmp_path / "text.txt"), "--steps", "2", "--batch-size", "2"]
        words += ["--seq-len", "16", "--eval-every", "0", "--precision", "bf16"]
        said = io.StringIO()
        with redirect_stdout(said):
            assert main([*words, "--backend", "sim:tpu-v5p"]) == 0
        line = next(line for line in said.getvalue().splitlines() if line.startswith("step      1"))
        assert "modelled" in line
        assert "measured on the host" in line
        assert "a step takes" in said.getvalue()
        with pytest.raises(ValueError, match=r"at least 24\.9 GB .* and 17\.2 GB are free"):
            main(["gpt2-xl", "--backend", "sim:tpu-v5e"])
        simulate("h100", memory_bytes=30 << 20)
        with pytest.raises(ValueError, match=r"(?s)out of memory \(simulated\).*largest line is activations"):
            main(["gpt2-tiny", *words[1:5], "--batch-size", "64", "--seq-len", "64", "--backend", "sim:h100"])

    aside.run(check)


@pytest.mark.multirank
@pytest.mark.parametrize("engine", ["fmlab", "torch"])
def test_data_parallel_ranks_compute_as_on_the_cpu_and_overlap_messages(fresh2: Ranks, engine: str) -> None:
    def run() -> Any:
        import torch.distributed as dist

        from fmlab.backends import get_backend
        from fmlab.models import GPT
        from fmlab.objectives.choice import objective_of
        from fmlab.parallel import Layout, parallelize
        from fmlab.sim import record

        rank, found, trace = dist.get_rank(), [], None
        for name in ("cpu", "sim:h100"):
            backend: Any = get_backend(name)
            torch.manual_seed(rank)
            model = GPT.from_preset("gpt2-tiny", num_layers=2)
            layout, objective = Layout(data=2, bucket_mb=0.5), objective_of(model)
            made = parallelize(
                model,
                layout,
                objective,
                lambda n: torch.optim.SGD([p for _, p in n], lr=0.1),
                engine,
                backend,
            )
            ids = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(rank))
            batch = {"input_ids": ids, "labels": ids}
            losses = [made.step([batch]).loss for _ in range(2)]
            if name != "cpu":
                with record(backend.chip) as trace:
                    losses.append(made.step([batch]).loss)
            else:
                losses.append(made.step([batch]).loss)
            found.append((losses, {k: v.tolist() for k, v in made.full_params().items()}))
            made.close()
        assert found[0] == found[1]
        assert trace is not None
        messages = [e for e in trace if e.kind == "collective"]
        gradients = [e for e in messages if e.phase == "backward"]
        computing = [e for e in trace if e.kind == "compute" and e.phase == "backward"]
        assert {e.collective for e in messages} == {"all_reduce"}
        assert all(e.group == (0, 1) and e.stream == 1 for e in messages)
        assert sum(e.payload_bytes for e in gradients) == 4 * sum(p.numel() for p in model.parameters())
        assert any(m.start < e.start < m.end for m in gradients for e in computing)
        assert trace.exposed_communication() < trace.busy("collective")
        return [m.start for m in messages]

    starts = fresh2.run(run)
    assert starts[0] == starts[1]  # a message starts when both ranks have come


@pytest.mark.multirank
def test_parity_of_ranks_on_simulated_chips(fresh2: Ranks) -> None:
    from fmlab.models import GPT, GPTConfig
    from fmlab.parallel import Layout, parity

    shape = dict(vocab_size=97, max_positions=32, num_layers=1, hidden_size=32, num_heads=2)
    layout = Layout(data=2, micro_batches=2)
    report = parity(lambda: GPT(GPTConfig(**shape)), layout, ranks=fresh2, backend="sim:trn2", steps=1)
    assert report.ok, str(report)


@pytest.mark.multirank
def test_torchs_own_shards_and_collectives_carry_simulated_tensors(fresh2: Ranks) -> None:
    def run() -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from fmlab.chips import switch
        from fmlab.sim import record, simulate

        rank = dist.get_rank()
        chip = simulate("h100", network=switch(2, 100e9, 5e-6))[0]
        x = torch.full((4,), float(rank + 1), device="sim")
        with record() as trace:
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            gathered = [torch.empty(4, device="sim") for _ in range(2)]
            dist.all_gather(gathered, x)
            parts = torch.empty(4, device="sim")
            dist.all_to_all_single(parts, torch.arange(4.0, device="sim") + 4 * rank)
            mail = torch.full((3,), float(rank), device="sim")
            dist.send(mail, 1) if rank == 0 else dist.recv(mail, 0)
            come = torch.zeros(2, device="sim")
            both = [dist.P2POp(dist.isend, x[:2].clone(), 1 - rank), dist.P2POp(dist.irecv, come, 1 - rank)]
            for waiting in dist.batch_isend_irecv(both if rank else both[::-1]):
                waiting.wait()
            dist.isend(x[:1].clone(), 1 - rank)  # both send before they receive
            first = torch.zeros(1, device="sim")
            dist.recv(first, 1 - rank)
        assert x.tolist() == gathered[1 - rank].tolist() == [3.0] * 4
        assert parts.tolist() == [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]
        assert mail.tolist() == [0.0] * 3
        assert (come.tolist(), first.tolist()) == ([3.0, 3.0], [3.0])
        sent = [e for e in trace if e.kind == "collective"]
        assert [e.collective for e in sent[:3]] == ["all_reduce", "all_gather", "all_to_all"]
        assert [e.payload_bytes for e in sent[:3]] == [16, 32, 16]
        assert all(e.seconds >= 5e-6 for e in sent)

        found = []
        for device in ("cpu", "sim"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]).to(device)
            mesh = init_device_mesh(device, (2,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            losses = []
            for _ in range(3):
                loss = model(torch.full((4, 16), 1.0 + rank, device=device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append((losses, [p.to_local().tolist() for p in model.parameters()]))
        assert found[0] == found[1]
        assert {"all_gather", "reduce_scatter"} <= set(chip.totals.messages)
        chip.memory.reclassify()
        assert chip.memory.lines["parameters"] == 4 * 3 * (16 + 1) * 8  # this rank's half

    fresh2.run(run)
