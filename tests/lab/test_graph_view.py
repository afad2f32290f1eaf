"""The graph viewer: any front end's graph becomes one form, a picture where nothing overlaps, and text."""

import re
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from fmlab.compiler import Fusion, PassManager, Program, capture, optimize
from fmlab.frontends import Graph, Node, in_torch, texts
from fmlab.frontends.spec import batch
from fmlab.lab.front_ends import Seen, see
from fmlab.lab.graph_command import main
from fmlab.lab.graph_layout import arrange
from fmlab.lab.graph_view import LOOKS, boxes, view

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    return see(committed=True)


def graph(*edges: tuple[str, str, tuple[str, ...]]) -> Graph:
    return Graph(tuple(Node(name, op, inputs) for name, op, inputs in edges))


HLO = """HloModule jit_f, entry_computation_layout={(f32[4,8]{1,0}, f32[8,16]{1,0})->(f32[4,16]{1,0})}

%fused_computation (p0: f32[4,16]) -> f32[4,16] {
  %p0 = f32[4,16]{1,0} parameter(0)
  ROOT %tanh.1 = f32[4,16]{1,0} tanh(f32[4,16]{1,0} %p0)
}

ENTRY %main.6 (x: f32[4,8], w: f32[8,16]) -> (f32[4,16]) {
  %x = f32[4,8]{1,0:T(8,128)} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  %dot.1 = f32[4,16]{1,0} dot(f32[4,8]{1,0} %x, f32[8,16]{1,0} %w), metadata={op_name="a(b)"}
  %c = f32[] constant(2)
  %all-reduce.1 = f32[4,16]{1,0} all-reduce(%dot.1), replica_groups={{0,1}}, to_apply=%add
  %fusion = f32[4,16]{1,0} fusion(%all-reduce.1), kind=kLoop, calls=%fused_computation
  ROOT %tuple = (f32[4,16]{1,0}) tuple(%fusion)
}
"""
STABLEHLO = """module @jit_f attributes {mhlo.num_partitions = 1 : i32} {
  func.func @main(%arg0: tensor<4x8xf32> {mhlo.sharding = "{}"}, %arg1: tensor<8x16xf32>) -> tensor<4xf32> {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : () -> tensor<4x16xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %1 = "stablehlo.reduce"(%0, %cst) ({
    ^bb0(%arg2: tensor<f32>, %arg3: tensor<f32>):
      %9 = stablehlo.add %arg2, %arg3 : tensor<f32>
      stablehlo.return %9 : tensor<f32>
    }) {dimensions = array<i64: 1>} : (tensor<4x16xf32>, tensor<f32>) -> tensor<4xf32>
    %2 = call @relu(%1) : (tensor<4xf32>) -> tensor<4xf32>
    %3 = stablehlo.add %2, %2 : tensor<4xf32>
    return %3 : tensor<4xf32>
  }
  func.func private @relu(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.tanh %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def test_hlo_and_stablehlo_are_read_with_every_edge_and_shape() -> None:
    found = {node.name: (node.op, node.inputs, node.shape) for node in texts.read(HLO).nodes}
    assert found == {
        "x": ("input", (), (4, 8)),
        "w": ("input", (), (8, 16)),
        "dot.1": ("dot", ("x", "w"), (4, 16)),
        "c": ("constant", (), ()),
        "all-reduce.1": ("all-reduce", ("dot.1",), (4, 16)),
        "fusion": ("fusion", ("all-reduce.1",), (4, 16)),
        "tuple": ("tuple", ("fusion",), (4, 16)),
    }
    assert "1 matrix product, 1 collective, 1 element by element, other, 1 shape" in view(HLO).summary
    found = {node.name: (node.op, node.inputs, node.shape) for node in texts.read(STABLEHLO).nodes}
    assert found == {
        "arg0": ("input", (), (4, 8)),
        "arg1": ("input", (), (8, 16)),
        "0": ("dot_general", ("arg0", "arg1"), (4, 16)),
        "cst": ("constant", (), ()),
        "1": ("reduce", ("0", "cst"), (4,)),
        "2": ("call relu", ("1",), (4,)),
        "3": ("add", ("2", "2"), (4,)),
    }


def test_the_text_of_each_captured_front_end_reads_back_as_its_graph(seen: dict[str, Seen]) -> None:
    assert texts.read(seen["xla"].text) == seen["xla"].graph
    for name in ("tensorflow", "torch.fx"):
        plain = [(node.name, node.op, node.inputs) for node in seen[name].graph.nodes if node.op != "input"]
        text = seen[name].text if name == "tensorflow" else str(seen[name].graph)
        read = texts.read(text).nodes
        assert [(node.name, node.op, node.inputs) for node in read if node.op != "input"] == plain
    jaxpr = texts.read(seen["jax"].text)
    assert jaxpr.counts["dot_general"] == seen["jax"].graph.counts["dot_general"] == 6
    called = {op: number for op, number in jaxpr.counts.items() if op.startswith("call ")}
    assert called == {"call _var": 2, "call tril": 1, "call _where": 1}
    assert jaxpr.nodes[-1].shape == (4, 8, 32)
    assert jaxpr.known_shapes == 1


def test_a_picture_of_any_front_end_shows_each_operation_once(seen: dict[str, Seen]) -> None:
    program = capture(in_torch.plain_block(), torch.from_numpy(batch()[0]))
    assert isinstance(program, Program)
    optimize(program, PassManager([Fusion()]))
    things = [*seen.values(), in_torch.by_fx(), in_torch.by_fx().graph, in_torch.by_export(), program, HLO]
    for thing in things:
        shown = view(thing)
        root = ElementTree.fromstring(shown.svg)
        about = "\n".join(title.text or "" for title in root.iter(f"{SVG}title"))
        for one in shown.graphs.values():
            for op in one.counts:
                assert f"= {op}(" in about
            lines = [line for box in boxes(one) if not box.given for line in box.about.splitlines()]
            assert sorted(lines) == sorted(str(Graph((n,))) for n in one.nodes if n.op in one.counts)
        assert shown.text == (thing.text if isinstance(thing, Seen) else shown.text)
        assert len(shown.svg) < 200_000
        assert shown.svg in shown._repr_html_()
        assert float(root.attrib["width"]) < 1500
    assert "fused_0" in view(program).svg
    assert "backward" in view(program).summary


def test_no_box_lies_on_another_and_no_edge_points_upwards(seen: dict[str, Seen]) -> None:
    for one in seen.values():
        for collapse in (True, False):
            made = boxes(one.graph, collapse)
            routes, width, height = arrange(made)
            for a, b in combinations(made, 2):
                apart = (a.width + b.width) / 2 <= abs(a.x - b.x)
                assert apart or a.y + a.height <= b.y or b.y + b.height <= a.y
            assert all(box.x - box.width / 2 >= 0 and box.x + box.width / 2 <= width for box in made)
            assert len(routes) == sum(len(box.inputs) for box in made)
            assert all(y1 <= y2 for route in routes for (_, y1), (_, y2) in pairwise(route))
            assert max(box.y + box.height for box in made) <= height


def test_chains_become_one_box_but_not_across_a_product_or_a_second_reader() -> None:
    line = graph(
        ("x", "input", ()),
        *((f"n{i}", "neg", (f"n{i - 1}" if i else "x",)) for i in range(7)),
        ("m", "mm", ("n6",)),
        ("a", "exp", ("m",)),
        ("b", "view", ("a",)),
        ("c", "add", ("b", "a")),
    )
    found = [box.lines for box in boxes(line)]
    assert found == [
        ("x",),
        ("neg", "neg", "… 3 more", "neg", "neg"),
        ("mm",),
        ("exp",),
        ("view",),
        ("add",),
    ]
    assert len(boxes(line, collapse=False)) == len(line.nodes)
    assert [box.kind for box in boxes(line)][1:3] == ["element by element, other", "matrix product"]
    assert "… and 3 more boxes" in view(line, most=3).svg


def test_no_kind_is_told_by_its_colour_alone_and_names_are_escaped() -> None:
    assert len({look[1:] for look in LOOKS.values()}) >= 5
    assert len({look[0] for look in LOOKS.values()}) == len(LOOKS)
    shown = view(graph(("a<b", "input", ()), ("c&d", "<lambda>", ("a<b",))), title="<script>")
    assert "<script>" not in shown._repr_html_()
    ElementTree.fromstring(shown.svg)


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (nn.Linear(2, 2), "Linear is a function, not yet a graph: capture it first"),
        (torch.zeros(2), "Tensor is no graph; what can be shown"),
        ("hello", "this text is no graph: it begins with 'hello'"),
        ("HloModule empty\n", "looks like HLO, but no line"),
        (graph(("x", "input", ())), "no operation"),
        (graph(("x", "neg", ("y",))), "a node reads 'y', which is no node of this graph"),
    ],
)
def test_what_is_no_graph_is_refused(thing: object, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        view(thing)


def test_graphs_of_frameworks_that_are_not_installed_here_are_known_by_what_they_have() -> None:
    float32 = SimpleNamespace(name="float32")
    shape = SimpleNamespace(as_list=lambda: [4, 8], rank=2)
    given = SimpleNamespace(name="x", type="Placeholder", inputs=[])
    given.outputs = [SimpleNamespace(shape=shape, dtype=float32, op=given)]
    tanh = SimpleNamespace(name="y", type="Tanh", inputs=given.outputs)
    tanh.outputs = [SimpleNamespace(shape=shape, dtype=float32, op=tanh)]
    shown = view(SimpleNamespace(graph=SimpleNamespace(get_operations=lambda: [given, tanh])))
    assert (shown.title, shown.text.splitlines()[1]) == ("tensorflow", "y = Tanh(x)  float32[4, 8]")
    a, b = (Variable(SimpleNamespace(shape=(4, 8), dtype="float32")) for _ in range(2))
    sine = SimpleNamespace(primitive=SimpleNamespace(name="sin"), invars=[a], outvars=[b], params={})
    shown = view(SimpleNamespace(jaxpr=SimpleNamespace(invars=[a], eqns=[sine])))
    assert (shown.title, str(shown.graphs[""]).splitlines()[1]) == (
        "jax",
        "sin_1 = sin(input_0)  float32[4, 8]",
    )


@dataclass(frozen=True, eq=False)
class Variable:
    """As a jaxpr's."""

    aval: SimpleNamespace


def test_the_command_writes_text_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text = tmp_path / "graph.svg", tmp_path / "program.txt"
    text.write_text(STABLEHLO)
    assert main(["block", "--front-end", "fx", "--svg", str(file)]) == 0
    said = capsys.readouterr().out
    assert "block in torch.fx" in said
    assert "attention_norm(x)" in said
    ElementTree.fromstring(file.read_text())
    assert main([str(text)]) == 0
    assert "1 matrix product, 1 reduction" in capsys.readouterr().out
    with pytest.raises(ValueError, match="jax captures 'block' alone"):
        main(["gpt2-tiny", "--front-end", "jax"])
    with pytest.raises(ValueError, match=r"torch\.fx cannot capture .* try --front-end export"):
        main(["gpt2-tiny", "--front-end", "fx"])
