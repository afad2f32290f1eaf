"""Objectives: what a model is trained for. Each returns named loss terms (sum, count, weight)."""

from fmlab.objectives.causal import CausalLM, shift_labels
from fmlab.objectives.contrastive import Contrastive
from fmlab.objectives.denoising import Denoising, NoiseSeeds
from fmlab.objectives.distillation import Distillation, hidden_loss, soft_loss
from fmlab.objectives.experts import ExpertsCausalLM
from fmlab.objectives.gather import gather_rows
from fmlab.objectives.labelled import Classification, Labelled, MaskedLM, Part, PrefixLM, Seq2SeqLM
from fmlab.objectives.reconstruction import Reconstruction
from fmlab.objectives.terms import LossTerms, Term, total_loss

__all__ = [
    "CausalLM",
    "Classification",
    "Contrastive",
    "Denoising",
    "Distillation",
    "ExpertsCausalLM",
    "Labelled",
    "LossTerms",
    "MaskedLM",
    "NoiseSeeds",
    "Part",
    "PrefixLM",
    "Reconstruction",
    "Seq2SeqLM",
    "Term",
    "gather_rows",
    "hidden_loss",
    "shift_labels",
    "soft_loss",
    "total_loss",
]
