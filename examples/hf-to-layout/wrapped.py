"""transformers' GPT-2 as a list of blocks: its own modules, which a pipeline can then cut between.

No matrix is divided by this plan, for transformers' Conv1D keeps them transposed and fuses queries, keys and
values in its own order; ZeRO and FSDP divide the parameters all the same.
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from fmlab.models import Block, ParallelPlan, Rule, State
from fmlab.models.cross_entropy import linear_cross_entropy


class Embed(Block):
    reads, writes = ("input_ids",), ("hidden",)

    def __init__(self, hf: GPT2LMHeadModel) -> None:
        super().__init__()
        self.wte, self.wpe = hf.transformer.wte, hf.transformer.wpe

    def forward(self, state: State) -> State:
        positions = torch.arange(state.input_ids.shape[1], device=state.input_ids.device)
        return state.updated(hidden=self.wte(state.input_ids) + self.wpe(positions))


class Layer(Block):
    reads, writes = ("hidden",), ("hidden",)

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: State) -> State:
        out = self.layer(state.hidden)
        return state.updated(hidden=out[0] if isinstance(out, tuple) else out)


class Head(Block):
    reads, writes = ("hidden", "labels"), ("logits", "loss_sum")

    def __init__(self, hf: GPT2LMHeadModel) -> None:
        super().__init__()
        self.norm, self.out = hf.transformer.ln_f, hf.lm_head

    def forward(self, state: State) -> State:
        hidden = self.norm(state.hidden)
        if "labels" not in state:
            return state.updated(logits=self.out(hidden))
        loss = linear_cross_entropy(hidden.flatten(0, 1), self.out.weight, state.labels.flatten())
        return state.updated(loss_sum=loss)


class WrappedGPT2(nn.Module):
    """`labels` are already shifted, as everywhere in fmlab: the token that follows each input."""

    def __init__(self, hf: GPT2LMHeadModel) -> None:
        super().__init__()
        self.config = hf.config
        self.blocks = nn.ModuleList([Embed(hf), *map(Layer, hf.transformer.h), Head(hf)])

    def prepare(self, input_ids: Tensor, labels: Tensor | None = None) -> State:
        return State(input_ids=input_ids) if labels is None else State(input_ids=input_ids, labels=labels)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> State:
        state = self.prepare(input_ids, labels)
        for block in self.blocks:
            state = block(state)
        return state

    def parallel_plan(self) -> ParallelPlan:
        last = len(self.blocks) - 1
        tied = (("blocks.0.wte.weight", f"blocks.{last}.out.weight"),)
        return ParallelPlan((Rule(".*", "replicate"),), tied, tuple(range(1, last + 1)))


def tiny() -> GPT2LMHeadModel:
    """transformers' model with random weights, without dropout; its attention is its plain one."""
    config = GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config)


def build() -> WrappedGPT2:
    return WrappedGPT2(tiny())
