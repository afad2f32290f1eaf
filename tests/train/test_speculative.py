"""Speculative decoding writes what the target would: every outcome of chance gone through, and samples."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fmlab.models import GPT, T5, GPTConfig, T5Config
from fmlab.train.generate import generate_ids, probabilities
from fmlab.train.speculative import Dice, speculative_ids
from tests.models.gpt_reference import small_gpt
from tests.models.llama_reference import small_llama
from tests.models.reference import roughen


def tiny(seed: int, vocab: int, **options: Any) -> GPT:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab, 12, 1, 8, 2, init_std=0.7, **options))
    roughen(model, seed, scale=0.4)
    return model.double().eval()


class EveryOutcome(Dice):
    """Plays a script of outcomes, then the first possible one each time, noting what else could have been."""

    def __init__(self, script: tuple[int, ...]):
        self.script, self.played, self.probability = script, [], 1.0
        self.others: list[tuple[int, ...]] = []

    def _next(self, chances: list[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        at = len(self.played)
        if at < len(self.script):
            choice = self.script[at]
        else:
            choice = possible[0]
            self.others += [(*self.played, other) for other in possible[1:]]
        self.probability *= chances[choice]
        self.played.append(choice)
        return choice

    def draw(self, chances_v: torch.Tensor) -> int:
        return self._next(chances_v.tolist())

    def accept(self, probability: float) -> bool:
        return bool(self._next([1 - probability, probability]))


def all_outcomes(run: Callable[[Dice], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of what `run` gives."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        dice = EveryOutcome(scripts.pop())
        text = run(dice)
        law[text] += dice.probability
        scripts += dice.others
    return dict(law)


def law_of(model: GPT, prompt: list[int], end: int, length: int, **warp: Any) -> dict[tuple[int, ...], float]:
    """The exact distribution of the texts that the model alone writes."""
    law: dict[tuple[int, ...], float] = defaultdict(float)

    def go(text: tuple[int, ...], chance: float) -> None:
        if len(text) == length or text[-1:] == (end,):
            law[text[:-1] if text[-1:] == (end,) else text] += chance
            return
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[:, -1]
        for token, p in enumerate(probabilities(logits, **warp)[0].tolist()):
            if p > 0:
                go((*text, token), chance * p)

    go((), 1.0)
    return dict(law)


@pytest.mark.parametrize("warp", [{}, {"temperature": 0.6, "top_k": 2}], ids=["plain", "warped"])
def test_every_outcome_of_chance_adds_up_to_the_targets_distribution(warp: dict[str, Any]) -> None:
    target, draft = tiny(0, 3), tiny(1, 3)
    prompt, end, length = [1, 0], 2, 3

    def run(dice: Dice) -> tuple[int, ...]:
        found = speculative_ids(target, draft, [prompt], end, length, draft_tokens=2, dice=dice, **warp)
        return tuple(found[0].ids)

    want = law_of(target, prompt, end, length, **warp)
    alone = law_of(draft, prompt, end, length, **warp)
    got = all_outcomes(run)
    assert math.isclose(sum(got.values()), 1.0, abs_tol=1e-12)
    assert set(got) == set(want)
    assert max(abs(got[text] - want[text]) for text in want) < 1e-12
    assert sum(abs(alone.get(text, 0) - want[text]) for text in want) > 0.3, "the draft must differ"


def test_samples_pass_a_chi_square_test() -> None:
    """25 pairs of tokens; 51.2 is exceeded by chance once in 1000 seeds. The draft's own law fails it."""
    target, draft = tiny(3, 5).float(), tiny(4, 5).float()
    count = 400
    want = law_of(target, [1], 5, 2)

    def statistic(pairs: list[tuple[int, ...]]) -> float:
        seen = Counter(pairs)
        return sum((seen[t] - count * p) ** 2 / (count * p) for t, p in want.items())

    found = speculative_ids(target, draft, [[1]] * count, 5, 2, draft_tokens=2, seed=1)
    assert len(want) == 25
    assert statistic([tuple(one.ids) for one in found]) < 51.2
    drafts = generate_ids(draft, [[1]] * count, 5, 2, seed=1)
    assert statistic([tuple(ids) for ids in drafts]) > 51.2


@pytest.mark.parametrize("family", [small_gpt, small_llama])
@pytest.mark.parametrize("draft_tokens", [1, 4, 7])
def test_greedy_speculation_is_greedy(family: Callable[..., Any], draft_tokens: int) -> None:
    untied = {"tie_embeddings": False}  # or the texts are one token over and over
    target, draft = family(**untied).double(), family(seed=1, num_layers=1, **untied).double()
    prompts = [[5, 17, 3], [9, 2, 41, 6], [1]]
    want = generate_ids(target, prompts, 13, 24, greedy=True)
    found = speculative_ids(target, draft, prompts, 13, 24, draft_tokens, greedy=True)
    assert [one.ids for one in found] == want
    assert len(set(want[0])) > 5
    assert target.training, "the modes must come back"


def test_a_perfect_draft_saves_calls_and_the_rate_is_reported() -> None:
    target = small_gpt().double()
    found = speculative_ids(target, target, [[5, 17]], 101, 24, draft_tokens=5)[0]
    assert found.acceptance_rate == 1.0
    assert len(found.ids) == 24
    assert found.calls == 24 // 6
    assert found.drafted == found.accepted == 20

    other = speculative_ids(target, small_gpt(seed=5).double(), [[5, 17]], 101, 24, draft_tokens=5)[0]
    assert 0 <= other.acceptance_rate < 1
    assert found.calls < other.calls <= 24


def test_an_encoder_decoder_speculates_too() -> None:
    models = []
    for seed, layers in ((0, 2), (1, 1)):
        torch.manual_seed(seed)
        models.append(T5(T5Config(31, layers, 24, 3, 8, 40)).double())
        roughen(models[-1], seed)
        with torch.no_grad():
            models[-1].get_parameter("blocks.0.tokens.weight").mul_(0.1)
    prompts = [[5, 17, 3, 1], [9, 2, 1]]
    found = speculative_ids(*models, prompts, 1, 12, greedy=True)
    assert [one.ids for one in found] == generate_ids(models[0], prompts, 1, 12, greedy=True)


BAD = {
    "draft": ({"draft_tokens": 0}, "draft_tokens must be at least 1"),
    "vocabulary": ({"draft": tiny(0, 7)}, "the target has 5 tokens and the draft 7"),
    "temperature": ({"temperature": 0.0}, "greedy=True"),
    "length": ({"max_new_tokens": 12}, "can be at most 11"),
}


@pytest.mark.parametrize("case", BAD)
def test_silly_values_are_refused(case: str) -> None:
    options, message = BAD[case]
    draft = options.pop("draft", tiny(1, 5))
    with pytest.raises(ValueError, match=message):
        speculative_ids(tiny(0, 5), draft, [[1]], 4, **{"max_new_tokens": 4, **options})


def test_the_enumeration_sees_a_wrong_rule() -> None:
    """Keeping every drafted token would pass no such proof."""
    target, draft = tiny(0, 3), tiny(1, 3)

    class Gullible(EveryOutcome):
        def accept(self, probability: float) -> bool:
            return True

    law: dict[tuple[int, ...], float] = defaultdict(float)
    for script in itertools.product(range(3), repeat=2):
        dice = Gullible(script)
        found = speculative_ids(target, draft, [[1, 0]], 3, 2, draft_tokens=1, dice=dice)
        law[tuple(found[0].ids)] += dice.probability
    want = law_of(target, [1, 0], 3, 2)
    assert sum(abs(law[text] - want[text]) for text in want) > 0.1
