"""Objectives: what a model is trained for. Each returns named loss terms (sum, count, weight)."""

from fmlab.objectives.causal import CausalLM, shift_labels
from fmlab.objectives.denoising import Denoising, NoiseSeeds
from fmlab.objectives.experts import ExpertsCausalLM
from fmlab.objectives.terms import LossTerms, Term, total_loss

__all__ = [
    "CausalLM",
    "Denoising",
    "ExpertsCausalLM",
    "LossTerms",
    "NoiseSeeds",
    "Term",
    "shift_labels",
    "total_loss",
]
