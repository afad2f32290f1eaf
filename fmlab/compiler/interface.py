"""What the forward graph hands to the backward graph, kept in step after passes changed either."""

from torch import fx

from fmlab.compiler.capture import Program
from fmlab.compiler.passes.base import drop_unread


def drop_unneeded(program: Program) -> int:
    """Save only what the backward graph still reads, and once what it would get twice; how many fewer."""
    if program.backward is None:
        program.forward.recompile()
        return 0
    forward, backward = program.forward.graph, program.backward.graph
    output = next(node for node in forward.nodes if node.op == "output")
    results = list(output.args[0])[: len(program.results)]
    saved = list(output.args[0])[len(program.results) :]
    taken = [node for node in backward.nodes if node.op == "placeholder"][: len(saved)]
    kept: dict[fx.Node, fx.Node] = {}
    for made, placeholder in zip(saved, taken, strict=True):
        if made in kept:
            placeholder.replace_all_uses_with(kept[made])
        if not placeholder.users:
            backward.erase_node(placeholder)
        else:
            kept[made] = placeholder
    output.args = ((*results, *kept),)
    drop_unread(forward)
    for module in (program.forward, program.backward):
        module.graph.lint()
        module.recompile()
    return len(saved) - len(kept)
