"""Model families, each one readable file, equal in numbers to the reference implementations."""

from fmlab.models.gpt import GPT, GPTConfig
from fmlab.models.plan import ParallelPlan, Rule, check_plan
from fmlab.models.state import Block, State

__all__ = ["GPT", "Block", "GPTConfig", "ParallelPlan", "Rule", "State", "check_plan"]
