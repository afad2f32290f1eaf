"""A dry run put together from blocks against the whole model run on one simulated chip."""

import torch

from fmlab.models import GPT
from fmlab.sim import dry_run, simulated_mode
from fmlab.sim.cores import FusedDropout, attention_core


def test_blocks_put_together_are_the_whole_step() -> None:
    """Every operator is charged by the same code, so FLOPs agree exactly; what differs is how gradients of a
    tied table meet, and tensors at the seams."""
    run = dry_run("gpt2", chip="a100-80gb", global_batch=4, seq_len=256, config=dict(dropout=0.1))
    with torch.device("meta"):
        config = GPT.from_preset("gpt2", dropout=0.1).config
        model = GPT(config, attention_core=attention_core("fused")).to(torch.bfloat16).train()
        ids = torch.zeros(4, 256, dtype=torch.long)
    with simulated_mode("a100-80gb", dry=True, unlimited=True) as chip, FusedDropout():
        model(ids, labels=ids).loss_sum.backward()
    assert run.hardware_flops == chip.totals.flops
    computing, whole = run.usages[0].computing, chip.seconds
    assert abs(computing / whole - 1) < 0.02
    lines = run.ledgers[0].lines
    held = lines["parameters"] + lines["activations"] + lines["working memory"]
    assert abs(held / chip.memory.peak - 1) < 0.05
