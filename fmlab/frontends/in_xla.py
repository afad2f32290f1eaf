"""The block on a lazy XLA device: every operation is noted, none is run, until the result is asked for.

A process of .venv-xla runs it: `python -m fmlab.frontends.in_xla`.
"""

import re
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fmlab.frontends import answer
from fmlab.frontends.in_torch import plain_block
from fmlab.frontends.spec import RATE, Arrays, batch

DEVICES = 2
# "%9 = f32[4,8]{1,0} aten::add(%7, %8), ..."; of several results, in brackets, the first
_LINE = re.compile(r"\s*(%\d+) = \(?(\w+)\[([\d,]*)\].*? ([a-z]\w*::\w+)\(([^)]*)\)")


# region step
def on_two_devices() -> Arrays:
    """The updated weights. As in JAX the program is the one for one device; x and target are marked."""
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    block = plain_block().to("xla")
    x, target = (torch.from_numpy(value).to("xla") for value in batch())
    mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES,), ("data",))
    for rows in (x, target):
        spmd.mark_sharding(rows, mesh, ("data", None, None))
    optimizer = torch.optim.SGD(block.parameters(), lr=RATE)
    F.mse_loss(block(x), target).backward()
    optimizer.step()
    torch_xla.sync()
    return {name: p.detach().cpu().numpy() for name, p in block.named_parameters()}


# endregion


# region lazy
def noted() -> tuple[str, torch.Tensor]:
    """The operations that stand behind the block's output before anything has run, and the output."""
    from fmlab.backends.xla_program import ir

    block, x = plain_block().to("xla"), torch.from_numpy(batch()[0]).to("xla")
    with torch.no_grad():
        output = block(x)
    return ir(output), output


# endregion


def nodes(text: str) -> list[dict[str, Any]]:
    """The nodes of a lazy graph's text."""
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            name, dtype, shape, op, inputs = match.groups()
            sizes = [int(size) for size in shape.split(",") if size]
            given = re.findall(r"%\d+", inputs)
            kind = "input" if op == "xla::device_data" else op.split("::")[-1]
            found.append(answer.node(name, kind, given, sizes, dtype))
    return found


def main() -> None:
    """Write the answer to standard output."""
    import os

    os.environ["CPU_NUM_DEVICES"] = str(DEVICES)
    from fmlab.backends.xla_environment import configure

    configure(device="CPU", fast_compile=True, capture=True)
    import torch_xla
    import torch_xla.runtime

    from fmlab.backends.xla_program import capture

    torch_xla.runtime.use_spmd()  # before any tensor is made: a later switch crashes torch_xla 2.9

    text, output = noted()
    captured = nodes(text)
    values = output.cpu().numpy()
    with capture() as programs:
        updated = on_two_devices()
    answer.send(
        versions={"torch": torch.__version__, "torch_xla": torch_xla.__version__},
        nodes=captured,
        text=text,
        output=values,
        updated=updated,
        program=programs.after[-1].text,
    )


if __name__ == "__main__":
    main()
