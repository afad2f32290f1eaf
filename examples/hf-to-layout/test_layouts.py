from functools import partial

import pytest
import torch
from wrapped import WrappedGPT2, build, tiny

from fmlab import Ranks
from fmlab.models import GPT, check_plan
from fmlab.parallel import Layout, parity

IDS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], 1)
BATCHES = [{"input_ids": IDS.repeat(4, 1), "labels": LABELS.repeat(4, 1)}] * 2


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 as transformers saves it."""
    path = tmp_path_factory.mktemp("gpt2")
    tiny().save_pretrained(path)
    return path


def test_both_ways_give_transformers_logits(folder):
    hf = type(tiny()).from_pretrained(folder, attn_implementation="sdpa").eval()
    expected = hf(IDS).logits
    torch.testing.assert_close(WrappedGPT2(hf)(IDS).logits, expected)
    torch.testing.assert_close(GPT.from_pretrained(folder)(IDS).logits, expected, atol=1e-5, rtol=1e-4)


def test_the_wrapped_blocks_can_be_cut_anywhere():
    check_plan(build(), {"input_ids": IDS})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, micro_batches=2),
        Layout(data=2, zero=3),
        Layout(data=2, fsdp=True),
        Layout(data=2, recompute="full"),
    ],
    ids=str,
)
def test_wrapped_under_a_layout(ranks, layout):
    parity(build, layout, batches=BATCHES, precision="fp64", ranks=ranks).raise_if_different()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, sequence_parallel=True),
        Layout(context=2),
        Layout(pipeline=2, micro_batches=2),
    ],
    ids=str,
)
def test_through_the_weight_map_under_any_layout(ranks, folder, layout):
    build = partial(GPT.from_pretrained, folder)
    parity(build, layout, batches=BATCHES, precision="fp64", ranks=ranks).raise_if_different()


def test_what_the_wrapped_plan_cannot_do_is_refused():
    with pytest.raises(ValueError, match="divides no"):
        parity(build, Layout(tensor=2), batches=BATCHES)
