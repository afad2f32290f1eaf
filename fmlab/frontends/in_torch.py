"""The block in PyTorch: traced by torch.fx, exported to ATen operators, and the step on two ranks, stated by
wrapping (DDP) or by placement (DTensor)."""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fmlab.frontends import answer
from fmlab.frontends.spec import EPS, HEADS, RATE, WIDTH, Arrays, batch, weights


# region block
class PlainBlock(nn.Module):
    """x [b,l,d] -> [b,l,d]: a layer of fmlab.models.GPT with its attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH, EPS), nn.LayerNorm(WIDTH, EPS)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "output": nn.Linear(WIDTH, WIDTH)}
        )
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention["qkv"](self.attention_norm(x))
        query, key, value = qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [b,h,l,k]
        scores = query @ key.transpose(2, 3) / (WIDTH // HEADS) ** 0.5
        causal = scores.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = scores.masked_fill(~causal, -float("inf")).softmax(-1) @ value
        x = x + self.attention["output"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp_norm(x)), approximate="tanh"))


# endregion


def plain_block() -> PlainBlock:
    """The block with the weights of spec.py."""
    block = PlainBlock()
    block.load_state_dict(OrderedDict((name, torch.from_numpy(value)) for name, value in weights().items()))
    return block


# region fx
def by_fx() -> fx.GraphModule:
    """Run forward once with a proxy in place of x: each call on it becomes a node. The sizes that forward
    reads are not known then, so that x.shape[1] is a node too, and `if x.shape[1] > 4` would be an error."""
    return fx.symbolic_trace(plain_block())


# endregion


# region export
def by_export() -> torch.export.ExportedProgram:
    """Run forward on tensors that have shapes and no data: nodes are ATen operators, the whole program is
    there or an error says why not, and the result can be saved and run without this Python code."""
    return torch.export.export(plain_block().eval(), (torch.from_numpy(batch()[0]),))


# endregion


# region step
def data_parallel_step(how: str) -> Arrays:
    """One rank's part of the step on this process group; the updated weights.

    how: "wrap": DistributedDataParallel averages gradients behind backward. "place": the weights are DTensors
    that are replicated on a mesh and x is one whose rows are divided; operators decide what is sent.
    """
    import torch.distributed as dist

    if how not in ("wrap", "place"):
        raise ValueError(f"how={how!r}: legal are 'wrap' and 'place'")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block = plain_block()
    whole_x, whole_target = (torch.from_numpy(value) for value in batch())
    if how == "wrap":
        model: nn.Module = nn.parallel.DistributedDataParallel(block)
        x, target = whole_x.chunk(ranks)[rank], whole_target.chunk(ranks)[rank]
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
        model = distribute_module(block, mesh)  # Replicate() on each parameter
        x, target = (distribute_tensor(value, mesh, [Shard(0)]) for value in (whole_x, whole_target))
    optimizer = torch.optim.SGD(block.parameters(), lr=RATE)
    error = model(x) - target
    (error * error).mean().backward()
    optimizer.step()
    return {name: _whole(p).detach().numpy() for name, p in block.named_parameters()}


# endregion


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_one_device() -> tuple[np.ndarray, Arrays]:
    """What all others are held to: the block's output, and the weights behind the step."""
    block = plain_block()
    x, target = (torch.from_numpy(value) for value in batch())
    output = block(x)
    F.mse_loss(output, target).backward()
    updated = {
        n: (p - RATE * p.grad).detach().numpy() for n, p in block.named_parameters() if p.grad is not None
    }
    return output.detach().numpy(), updated


def nodes(graph: fx.Graph) -> list[dict[str, Any]]:
    """The nodes of an fx graph; shapes where the tracer knew them."""
    found = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        value = value[0] if isinstance(value, (list, tuple)) else value  # of several results the first
        known = isinstance(value, Tensor)
        kind = "input" if node.op in ("placeholder", "get_attr") else _kind(node)
        inputs = [one.name for one in node.all_input_nodes]
        dtype = str(value.dtype).removeprefix("torch.") if known else ""
        found.append(answer.node(node.name, kind, inputs, value.shape if known else None, dtype))
    return found


def _kind(node: fx.Node) -> str:
    if node.op == "call_module":
        owner = node.graph.owning_module
        assert owner is not None
        return type(owner.get_submodule(str(node.target))).__name__
    if isinstance(node.target, str):
        return node.target
    name = str(getattr(node.target, "__name__", node.target))
    return name.split(".")[0]
