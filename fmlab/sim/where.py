"""Where a program is: which module runs, and whether it goes forward, backward or updates the weights.

torch's global hooks say which module and which optimizer is at work. In the backward pass no module runs;
there the operation is traced to the forward operation that it differentiates: both have the same sequence
number.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fmlab.sim.event import Phase

_LIMIT = 1_000_000  # forward operations remembered for a backward pass that may never come
_peek_sequence = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node


class Where:
    """Follows the modules and optimizers of this process from `install` on."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.optimizing = False
        self.after_update: list[Any] = []  # called when an optimizer has made a step
        self.new_root: list[Any] = []  # called with a module that runs for the first time, inside no other
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._forward: dict[int, str] = {}  # sequence number -> module
        self._handles: list[Any] = []
        self._users = 0

    def remove(self) -> None:
        """Take the hooks away when nobody is left who asked for them."""
        self._users -= 1
        if self._users == 0:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self.stack, self.optimizing = [], False
            self._forward.clear()

    def install(self) -> None:
        """Put the hooks in place, if they are not."""
        self._users += 1
        if self._handles:
            return
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def here(self) -> tuple[str, Phase]:
        """(path of the module, phase) of the operation that is about to run."""
        if self.optimizing:
            return "", "optimizer"
        if _graph_task() != -1:
            if self.stack:  # recomputed activations
                return self.stack[-1], "backward"
            node = _node()
            return ("" if node is None else self._forward.get(node._sequence_nr(), "")), "backward"
        module = self.stack[-1] if self.stack else ""
        if torch.is_grad_enabled():
            if module:
                if len(self._forward) > _LIMIT:
                    self._forward.clear()
                self._forward[_peek_sequence() - 1] = module  # autograd has made the operation's node already
            return module, "forward"
        return module, "forward" if self.stack else ""

    @staticmethod
    def accumulating() -> bool:
        """Whether autograd is just putting a gradient where its parameter's owner finds it."""
        node = _node() if _graph_task() != -1 else None
        return node is not None and node.name() == "torch::autograd::AccumulateGrad"

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # a model for another device: there is nothing to follow
            return
        if not self.stack:
            self.optimizing = False  # an optimizer that raised has not said that it ended
        name = self._names.get(module)
        if name is None:
            for path, part in module.named_modules():
                self._names.setdefault(part, path or type(module).__name__)
            name = self._names[module]
            if not self.stack:
                for call in self.new_root:
                    call(module)
        self.stack.append(name)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.stack and not torch.compiler.is_compiling():
            self.stack.pop()

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizing = True

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizing = False
        self._forward.clear()
        for call in self.after_update:
            call()


WHERE = Where()
