"""Experts on several ranks: tokens travel to them and back (Lepikhin et al. 2020, arXiv:2006.16668, section
3.2).

Each rank routes its own tokens among all experts and holds a few of those. An all-to-all brings every
(token, choice) pair to the rank of its expert, another one brings the result home, where it is weighted.
How many pairs travel where is known only then, so the ranks first tell each other.

Nothing is scaled. A token's loss was divided by the number of targets of all ranks before, and the gradient
that its expert gets on another rank is the one it would get at home; so the sum over the tokens that arrive
is the sum over all. To average it over the ranks that the experts are divided among, as one does with copies,
would be wrong, and so would be a sum over ranks that hold other experts.

Shapes: n tokens, k choices, d hidden width, r ranks, e experts of one rank, m pairs that arrive.
"""

import torch
from torch import Tensor

from fmlab.models.functions import compute_dtype
from fmlab.models.layers import Activation
from fmlab.models.moe import run_experts
from fmlab.parallel.exchange import exchange_forward_exchange_backward as exchange
from fmlab.parallel.mesh import Axis


class DispatchCore:
    """An ExpertCore for experts of which each rank of `axis` holds an equal number, in the order of ranks.

    Every rank calls it, also one without tokens.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    # region dispatch
    def __call__(
        self, x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
    ) -> Tensor:
        """See ExpertCore: `expert` counts the experts of all ranks, `gate_up` and `down` hold this rank's."""
        ranks, here = self.axis.size, len(gate_up)
        pair = expert.flatten().argsort(stable=True)  # by rank and expert; what has nobody comes last
        leaving_re = expert.flatten().bincount(minlength=ranks * here)[: ranks * here].view(ranks, here)
        arriving_re = self.axis.all_to_all(leaving_re)  # [from whom, to which expert]
        leaving, arriving = torch.stack([leaving_re, arriving_re]).tolist()  # the host waits here
        send, receive = ([sum(row) for row in table] for table in (leaving, arriving))
        pair = pair[: sum(send)]
        token = pair // expert.shape[1]
        arrived_md = exchange(x[token].to(compute_dtype(x)), self.axis, send, receive)
        order = by_expert(arriving_re)
        counts = [sum(column) for column in zip(*arriving, strict=True)]
        mixed_md = run_experts(arrived_md[order], counts, gate_up, down, activation)
        returned = exchange(mixed_md[order.argsort()], self.axis, receive, send)
        weighted = returned * weight.flatten()[pair, None]
        return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))

    # endregion


def by_expert(arriving_re: Tensor) -> Tensor:
    """The order [m] that sorts pairs, which arrive by rank and then by expert, by expert and then by rank."""
    ranks, here = arriving_re.shape
    expert_re = torch.arange(here, device=arriving_re.device).expand(ranks, here)
    return expert_re.flatten().repeat_interleave(arriving_re.flatten()).argsort(stable=True)
