"""What can be told of the model's plan from its structure alone."""

import torch
from model import build

from fmlab.models import draft_plan

with torch.device("meta"):  # no memory is needed
    print(draft_plan(build()))
