"""torch's own wrappers around the model: the same gradients, on two ranks with half the rows each."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fmlab import RankError, Ranks
from fmlab.models import GPT
from tests.models.gpt_reference import shifted, small_gpt, tokens

pytestmark = pytest.mark.multirank


def fsdp(model: GPT, dtype: torch.dtype | None) -> GPT:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in list(model.blocks)[1:-1]:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def error_of_gradients(kind: str) -> float:
    """The largest ‖difference‖ / ‖gradient‖ of all parameters, against the plain model on all rows."""
    torch.manual_seed(0)
    plain, model = small_gpt(), small_gpt()
    model.load_state_dict(plain.state_dict())
    rows = tokens(4, 20)
    plain(rows, labels=shifted(rows)).loss_sum.backward()
    mine = rows[2 * dist.get_rank() :][:2]
    dtype = torch.bfloat16 if kind == "fsdp bf16" else None
    wrapped = DistributedDataParallel(model) if kind == "ddp" else fsdp(model, dtype)
    (2 * wrapped(mine, labels=shifted(mine))["loss_sum"]).backward()  # they average over two ranks
    worst = 0.0
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        grad = parameter.grad if kind == "ddp" else parameter.grad.full_tensor()  # type: ignore[union-attr]
        worst = max(worst, float((grad - reference.grad).norm() / reference.grad.norm()))  # type: ignore
    return worst


@pytest.mark.parametrize(("kind", "allowed"), [("ddp", 1e-5), ("fsdp", 1e-5), ("fsdp bf16", 0.1)])
def test_wrapped_models_have_the_gradients_of_the_plain_one(ranks2: Ranks, kind: str, allowed: float) -> None:
    assert max(ranks2.run(error_of_gradients, kind)) < allowed


def generate_under_mixed_precision() -> None:
    model = fsdp(small_gpt(), torch.bfloat16)
    model(tokens(1, 4), cache=model.new_cache(1))


def test_a_lost_cache_is_an_error_and_not_wrong_text(ranks2: Ranks) -> None:
    with pytest.raises(RankError, match="lost the cache"):
        ranks2.run(generate_under_mixed_precision)
