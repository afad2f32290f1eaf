"""The map of a step: whose time an operator is, memory over a step, steps on simulated chips, links."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from fmlab import Ranks
from fmlab.lab import navigation
from fmlab.lab.curriculum import load
from fmlab.lab.map import KINDS, STACK, kind_of, layer_of, memory_line, shares, train_step
from fmlab.lab.map_view import map_view
from fmlab.lab.roofline import operations
from fmlab.meter import peak_memory
from fmlab.models import GPT


@pytest.mark.parametrize(
    ("operator", "phase", "layer"),
    [
        ("aten::addmm", "forward", "kernels"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "backward", "kernels"),
        ("attention", "", "kernels"),
        ("aten::native_layer_norm", "forward", "graph"),
        ("fused(_to_copy, add)", "forward", "graph"),  # what is fused converts for nothing
        ("aten::_to_copy", "forward", "bits"),
        ("aten::_fused_adamw_", "", "states"),
        ("aten::mul", "optimizer", "states"),
    ],
)
def test_every_operator_has_a_layer(operator: str, phase: str, layer: str) -> None:
    assert layer_of(operator, phase) == layer


def test_the_layers_are_those_of_the_stack_and_their_chapters_exist() -> None:
    curriculum = load()
    assert set(KINDS.values()) < {layer.name for layer in STACK}
    for layer in STACK:
        assert all(number in curriculum.by_number for number in layer.chapters), layer.name


def _step() -> Any:
    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny", num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(4096, (2, 32))
    return model, lambda bf16=False: train_step(model, optimizer, ids, ids, bf16)


def test_products_have_six_flops_a_weight_and_token() -> None:
    model, step = _step()
    work = operations(step)
    c = model.config
    matrices = 12 * c.num_layers * c.hidden_size**2 + c.vocab_size * c.hidden_size
    assert sum(one.flops for one in work if kind_of(one.name) == "products") == 6 * matrices * 64
    assert sum(one.flops for one in work if KINDS[kind_of(one.name)] in ("graph", "states")) == 0


def test_the_memory_line_reaches_the_peak_and_grows_by_the_states() -> None:
    with peak_memory() as memory:
        held = _step()
        held[1]()
        held[1]()
    del held
    with memory_line() as line:
        model, step = _step()
        begin = line[-1]
        step()
        after = line[-1]
    assert max(line) <= memory.peak
    n = model.num_parameters()
    assert 4 * n <= begin < 4 * n + 2000  # and the tokens
    assert 8 * n <= after - begin < 8 * n + 2000  # AdamW's averages, and its counters


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[str, Any]]:
    """Numbers of steps on simulated chips, made in a process of their own."""

    def run() -> Any:
        from fmlab.lab.map import on_chip

        found = {}
        for name, preset, rows, length, how in (
            ("h100", "gpt2-tiny", 2, 64, None),
            ("h100", "gpt2-tiny", 2, 64, "compiled"),
            ("trn2", "gpt2-tiny", 2, 64, None),
            ("h100", "gpt2-medium", 8, 1024, None),
        ):
            one = on_chip(name, preset, rows, length, how)  # type: ignore[arg-type]
            found[f"{name} {preset}" + (f" {how}" if how else "")] = dict(
                time=one.time,
                memory=one.memory,
                step=one.step,
                seconds=one.seconds,
                waiting=one.waiting,
                issued=one.issued,
                bound=one.bound(),
                busy=one.trace.busy(),
                parameters=one.parameters,
                flops=one.trace.flops,
            )
        return found

    with Ranks(1, timeout=100) as aside:
        return aside.run(run)[0]


def test_time_by_layer_adds_up(steps: dict[str, dict[str, Any]]) -> None:
    for one in steps.values():
        assert sum(one["time"].values()) == pytest.approx(one["seconds"] + one["waiting"])
        assert sum(one["bound"].values()) == pytest.approx(one["busy"])
        assert all(part >= 0 for part in one["time"].values())


def test_python_holds_up_the_small_step_only_and_no_compiled_one(steps: dict[str, dict[str, Any]]) -> None:
    front = {name: shares(one["time"])["front end"] for name, one in steps.items()}
    assert front["h100 gpt2-tiny"] > 80
    assert front["h100 gpt2-medium"] < 5
    for name in ("trn2 gpt2-tiny", "h100 gpt2-tiny compiled"):
        assert front[name] == pytest.approx(0, abs=1e-9)
    assert steps["h100 gpt2-tiny compiled"]["step"] < steps["h100 gpt2-tiny"]["step"] / 5


def test_a_stop_watch_that_does_not_wait_shows_more_than_the_peak(steps: dict[str, dict[str, Any]]) -> None:
    one = steps["h100 gpt2-medium"]
    assert one["flops"] / one["issued"] > 989e12 > one["flops"] / one["seconds"]


def test_memory_is_states_copies_and_activations(steps: dict[str, dict[str, Any]]) -> None:
    for one in steps.values():
        assert one["memory"]["states"] / one["parameters"] == pytest.approx(12, abs=0.1)  # no gradients yet
        assert 0 < one["memory"]["bits"] <= 2 * one["parameters"]
        assert one["memory"]["graph"] > 0


def test_the_map_needs_a_step_and_carries_numbers() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        map_view({}, "A sentence.")

    class Made:
        time = dict.fromkeys((layer.name for layer in STACK), 1.0)
        memory = time

    said = repr(map_view({"one": Made(), "two": Made()}, "A sentence."))  # type: ignore[dict-item]
    assert "two, memory: front end 17 %" in said
    assert said.startswith("Figure (modelled)")


def test_chapters_in_texts_become_links() -> None:
    curriculum = load()
    entry = curriculum.find("0.3")
    text = navigation.linked("see [[1.9]]", curriculum, entry, solved=False)
    assert text == "see [1.9 Chips](../1_models_to_bits/1.9_chips.ipynb)"
    solved = navigation.linked("see [[1.9]]", curriculum, entry, solved=True)
    assert solved == "see [1.9 Chips](../../1_models_to_bits/1.9_chips.ipynb)"
    number = navigation.linked("(chapter [[#1.9]])", curriculum, entry, solved=False)
    assert number == "(chapter [1.9](../1_models_to_bits/1.9_chips.ipynb))"
    later = replace(curriculum.find("1.9"), status="to come")
    without = replace(
        curriculum, entries=tuple(later if e.number == "1.9" else e for e in curriculum.entries)
    )
    assert navigation.linked("[[1.9]]", without, entry, solved=False) == "1.9 Chips (to come)"
    assert navigation.linked("([[#1.9]])", without, entry, solved=False) == "(1.9)"
    with pytest.raises(ValueError, match=re.escape("no notebook '7.7'")):
        navigation.linked("[[7.7]]", curriculum, entry, solved=False)
