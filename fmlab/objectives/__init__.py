"""Objectives: what a model is trained for. Each returns named loss terms (sum, count, weight)."""

from fmlab.objectives.causal import CausalLM, shift_labels
from fmlab.objectives.contrastive import Contrastive
from fmlab.objectives.denoising import Denoising, NoiseSeeds
from fmlab.objectives.experts import ExpertsCausalLM
from fmlab.objectives.gather import gather_rows
from fmlab.objectives.terms import LossTerms, Term, total_loss

__all__ = [
    "CausalLM",
    "Contrastive",
    "Denoising",
    "ExpertsCausalLM",
    "LossTerms",
    "NoiseSeeds",
    "Term",
    "gather_rows",
    "shift_labels",
    "total_loss",
]
