"""Problems that are made, not collected: sums with and without worked steps, and small instructions.

The same arguments give the same problems. There are as many as wanted, no answer is wrong, and nobody has
seen them in training.
"""

import random
import re
from collections.abc import Callable

from fmlab.data.card import card
from fmlab.data.text_pairs import TextPairs

_ANSWER = re.compile(r"The answer is (-?\d+)\.")


def arithmetic(
    count: int = 2000, seed: int = 0, steps: bool = False, digits: int = 2, terms: int = 4
) -> TextPairs:
    """Sums and differences, such as "12 + 7 - 3 = ?", each problem once.

    steps:  answer "12 + 7 = 19. 19 - 3 = 16. The answer is 16." instead of "The answer is 16."; the problems
            are the same, so that what the steps are worth can be measured
    digits: numbers have at most so many
    terms:  numbers in a problem; no partial result is negative
    Raises ValueError for sizes below 1 (terms: 2), or when there are not `count` different problems.
    """
    if min(count, digits, terms - 1) < 1:
        raise ValueError(
            f"count and digits must be at least 1 and terms 2, got {count}, {digits} and {terms}"
        )
    dice = random.Random(f"arithmetic {seed} {digits} {terms}")
    made: dict[str, str] = {}
    for _ in range(20 * count):
        problem, worked, result = _sum(dice, digits, terms)
        made.setdefault(problem, f"{worked if steps else ''}The answer is {result}.")
        if len(made) == count:
            break
    else:
        raise ValueError(
            f"hardly more than {len(made)} different problems of {terms} numbers of {digits} digits turn up, "
            f"wanted {count}; ask for fewer, or for more digits or terms"
        )
    return TextPairs(
        "arithmetic-steps" if steps else "arithmetic", list(made), list(made.values()), card("arithmetic")
    )


def answer_of(text: str) -> int | None:
    """The number in the last "The answer is ..." of a text, or None."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


def _sum(dice: random.Random, digits: int, terms: int) -> tuple[str, str, int]:
    total = dice.randrange(10**digits)
    problem, worked = str(total), ""
    for _ in range(terms - 1):
        number, before = dice.randrange(10**digits), total
        sign = "-" if number <= total and dice.random() < 0.5 else "+"
        total = total - number if sign == "-" else total + number
        problem += f" {sign} {number}"
        worked += f"{before} {sign} {number} = {total}. "
    return f"{problem} = ?", worked, total


_WORDS = (
    "apple bread chair dance eagle flute grape house igloo jelly knife lemon music night ocean paper queen "
    "river stone table uncle voice water xenon yacht zebra anchor bottle candle dragon engine forest garden "
    "hammer island jacket kettle ladder mirror needle orange pencil rabbit saddle tunnel velvet window"
)
WORDS = _WORDS.split()


def _numbers(dice: random.Random) -> list[int]:
    return dice.sample(range(1, 100), dice.randint(3, 5))


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))


def _on_word(answer: Callable[[str], str]) -> Callable[[random.Random], tuple[str, str]]:
    def make(dice: random.Random) -> tuple[str, str]:
        word = dice.choice(WORDS)
        return word, answer(word)

    return make


def _on_numbers(answer: Callable[[list[int]], str]) -> Callable[[random.Random], tuple[str, str]]:
    def make(dice: random.Random) -> tuple[str, str]:
        numbers = _numbers(dice)
        return _listed(numbers), answer(numbers)

    return make


#: Task -> (ways to ask, what makes a content and its answer).
TASKS: dict[str, tuple[tuple[str, ...], Callable[[random.Random], tuple[str, str]]]] = {
    "reverse": (("Spell {} backwards.", "Reverse the word {}."), _on_word(lambda w: w[::-1])),
    "capitals": (("Write {} in capital letters.", "Put {} into upper case."), _on_word(str.upper)),
    "length": (("How many letters has {}?", "Count the letters of {}."), _on_word(lambda w: str(len(w)))),
    "first": (
        ("What is the first letter of {}?", "Which letter does {} begin with?"),
        _on_word(lambda w: w[0]),
    ),
    "last": (("What is the last letter of {}?", "Which letter does {} end with?"), _on_word(lambda w: w[-1])),
    "twice": (("Repeat {} twice.", "Say {} two times."), _on_word(lambda w: f"{w} {w}")),
    "sort": (("Sort these numbers: {}.", "Put in order: {}."), _on_numbers(lambda n: _listed(sorted(n)))),
    "largest": (
        ("Which number is the largest: {}?", "Find the maximum of {}."),
        _on_numbers(lambda n: str(max(n))),
    ),
    "smallest": (
        ("Which number is the smallest: {}?", "Find the minimum of {}."),
        _on_numbers(lambda n: str(min(n))),
    ),
    "even": (
        ("Which of these are even: {}?", "Keep the even numbers: {}."),
        _on_numbers(lambda n: _listed([i for i in n if i % 2 == 0]) or "none"),
    ),
}


def instructions(count: int = 2000, seed: int = 0, tasks: list[str] | None = None) -> TextPairs:
    """Instructions and responses of ten kinds, such as "Spell table backwards." -> "elbat", each once.

    A question comes in two wordings. For a test of questions never answered, `split(by=lambda _, answer:
    answer)` keeps them together.

    tasks: some of TASKS, so that others can be kept to see whether following instructions carries over;
           `kinds` of the result says which task each is
    Raises ValueError for unknown tasks, or when there are not `count` different instructions.
    """
    chosen = list(TASKS) if tasks is None else tasks
    if unknown := [task for task in chosen if task not in TASKS]:
        raise ValueError(f"unknown tasks {unknown}; legal: {', '.join(TASKS)}")
    if count < 1 or not chosen:
        raise ValueError(f"count must be at least 1 and tasks not empty, got {count} and {chosen}")
    dice = random.Random(f"instructions {seed} {chosen}")
    made: dict[str, tuple[str, str]] = {}
    for _ in range(20 * count):
        task = dice.choice(chosen)
        ways, make = TASKS[task]
        content, answer = make(dice)
        made.setdefault(dice.choice(ways).format(content), (answer, task))
        if len(made) == count:
            break
    else:
        raise ValueError(
            f"hardly more than {len(made)} different instructions of these tasks turn up, wanted {count}; "
            "ask for fewer, or take tasks with numbers: sort, largest, smallest, even"
        )
    answers, kinds = zip(*made.values(), strict=True)
    return TextPairs("instructions", list(made), list(answers), card("instructions"), list(kinds))
