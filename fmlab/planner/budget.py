"""What to train with a budget of FLOPs: how large a model, on how many tokens (Hoffmann et al. 2022).

Their third approach fits the loss after training as L(N, D) = E + A / N^alpha + B / D^beta, with N parameters
and D tokens (arXiv:2203.15556, section 3.3 and appendix D.3). With 6 N D FLOPs to spend, it is least at
N = G (C / 6)^(beta / (alpha + beta)), D = (C / 6)^(alpha / (alpha + beta)) / G.

    training_flops(174.6e9, 300e9)              3.14e23: GPT-3's, by 6 N D
    chinchilla(5.76e23)                         the fit's best parameters and tokens, and its loss
    chinchilla(5.76e23, rule="20 tokens a parameter")
    chinchilla_loss(70e9, 1.4e12)

The fit is one group's, on one corpus: advice on proportions, no forecast of your loss. It asks for more
tokens a parameter than the paper's first two approaches, which gave the rule of 20; both are here.
"""

import math
from dataclasses import dataclass
from typing import Literal

from fmlab.parallel.values import above_zero

#: Constants of the fit, as printed (arXiv:2203.15556, appendix D.3).
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
RULES = ("fit", "20 tokens a parameter")


def training_flops(parameters: float, tokens: float) -> float:
    """6 FLOPs for each parameter and token: 2 forward, 4 backward; attention's products are left out."""
    return (
        6
        * above_zero(parameters, f"parameters={parameters!r}", "give a number above 0")
        * above_zero(tokens, f"tokens={tokens!r}", "give a number above 0")
    )


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """The fit's loss [nats a token] of so many parameters trained on so many tokens."""
    n = above_zero(parameters, f"parameters={parameters!r}", "give a number above 0")
    d = above_zero(tokens, f"tokens={tokens!r}", "give a number above 0")
    return E + A / n**ALPHA + B / d**BETA


@dataclass(frozen=True)
class Budget:
    """flops: to spend. parameters, tokens: how. loss: the fit's, nats a token."""

    flops: float
    parameters: float
    tokens: float
    loss: float
    rule: str

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    def __str__(self) -> str:
        return (
            f"{self.flops:.3g} FLOPs: {self.parameters / 1e9:.3g} billion parameters "
            f"on {self.tokens / 1e9:.4g} billion tokens "
            f"({self.tokens_per_parameter:.3g} a parameter; {self.rule})"
        )


def chinchilla(flops: float, rule: Literal["fit", "20 tokens a parameter"] = "fit") -> Budget:
    """How to spend a budget of FLOPs. Raises ValueError for one that is not above 0, and for an unknown
    rule."""
    spent = above_zero(flops, f"flops={flops!r}", "give FLOPs above 0") / 6
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: legal are {', '.join(RULES)}")
    if rule == "fit":
        g = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
        parameters = g * spent ** (BETA / (ALPHA + BETA))
    else:
        parameters = math.sqrt(spent / 20)
    tokens = spent / parameters
    return Budget(flops, parameters, tokens, chinchilla_loss(parameters, tokens), rule)
