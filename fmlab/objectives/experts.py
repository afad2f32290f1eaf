"""Next-token prediction with a mixture of experts, and what keeps the experts in use.

Shapes: b batch, l sequence length.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import Batch
from fmlab.objectives.causal import CausalLM
from fmlab.objectives.terms import LossTerms, Term


class ExpertsCausalLM(CausalLM):
    """Three terms: "causal"; "balance", which is least when all experts are used alike; "router_z", which
    keeps the router's logits small.

    The model returns, beside "loss_sum", "balance_sum" and "router_z_sum", sums over the real tokens (all
    that `attention_mask` does not call padding). The balance loss belongs to the batch of one forward pass:
    cutting a batch into micro-batches changes it, unlike the other two. Cutting it over ranks does not, where
    those count the choices of experts together (fmlab.parallel.expert.balance), as the engine "fmlab" does.

    Args:
        balance: weight of that term; 0.01 in Switch (Fedus et al. 2021), 0.001 in transformers' Mixtral.
        router_z: weight of that one; 0.001 in ST-MoE (Zoph et al. 2022, arXiv:2202.08906).

    Raises ValueError for a negative weight.
    """

    def __init__(self, balance: float = 0.01, router_z: float = 0.001):
        if balance < 0 or router_z < 0:
            raise ValueError(f"weights of loss terms must be 0 or more, got {balance} and {router_z}")
        self.balance, self.router_z = balance, router_z

    #: A batch that is cut over ranks, but not into micro-batches, has the loss of the whole under "fmlab".
    exact_over_ranks = True

    @property
    def depends_on_cut(self) -> str:
        """Why this loss is another one when the batch is cut over ranks or micro-batches; "" if it is not."""
        if not self.balance:
            return ""
        return "the balance of the experts is that of one forward pass; compare with balance=0"

    def without_cut(self) -> "ExpertsCausalLM":
        """The same without what depends on how a batch is cut."""
        return ExpertsCausalLM(0.0, self.router_z)

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run the model and return {"causal": Term, "balance": Term, "router_z": Term}."""
        labels_bl = self.labels(batch)
        state = model(**{**batch, "labels": labels_bl})
        real = self._real_tokens(batch)
        return {
            self.name: Term(state["loss_sum"], self._count(labels_bl)),
            "balance": Term(state["balance_sum"], real, self.balance),
            "router_z": Term(state["router_z_sum"], real, self.router_z),
        }

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many targets, and how many real tokens, the batch has: no forward pass is needed."""
        real = self._real_tokens(batch)
        return super().counts(batch) | {"balance": real, "router_z": real}

    @staticmethod
    def _real_tokens(batch: Batch) -> Tensor:
        if "attention_mask" in batch:
            return batch["attention_mask"].bool().sum()
        ids = batch["input_ids"]
        return torch.tensor(ids.numel(), device=ids.device)
