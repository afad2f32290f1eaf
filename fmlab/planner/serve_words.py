"""A serving plan in words: memory and times line by line, latency against throughput, what would fit."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from fmlab.planner.tables import gib, seconds

if TYPE_CHECKING:
    from fmlab.planner.serving import ServePlan

Change = dict[str, Any]
SHOWN = 3  # changes after which it would fit


def text(one: "ServePlan") -> str:
    """The whole plan, for a terminal."""
    at = one.prompt + one.generated
    lines = [
        f"{one.shape.name} on {one.tensor} x {one.machine.chip.name}: modelled",
        f"  {one.batch} sequences of {one.prompt} + {one.generated} tokens",
        f"  first token {seconds(one.first_token)}, then {seconds(one.each_token)} each; "
        f"{one.tokens_per_second:,.0f} tokens/s, bound by {one.bound}",
        f"memory of a rank: {gib(one.peak_memory)}, {verdict(one)}",
        *_rows(one.memory, gib),
    ]
    for said, other in what_would_fit(one)[:SHOWN]:
        lines.append(f"  {'it would fit with':22} {said}: {seconds(other.each_token)} a token")
    lines += ["prefill", *_rows(one.prefill, seconds)]
    return "\n".join([*lines, f"a decoding step at {at} positions", *_rows(one.decode(at), seconds)])


def _rows(lines: Mapping[str, float], said: Any) -> Iterator[str]:
    from fmlab.planner.serving import FORMULAS

    yield from (f"  {name:22} {said(value):>12}   {FORMULAS[name]}" for name, value in lines.items())


def verdict(one: "ServePlan") -> str:
    """Whether it fits, and by how much it does not."""
    if one.machine.capacity is None:
        return f"no source gives the memory of {one.machine.chip.name}"
    room = gib(one.machine.capacity)
    if one.fits:
        return f"fits {room}; {one.largest_batch:,} sequences at once would"
    largest = max(one.memory, key=one.memory.__getitem__)
    return f"does NOT fit {room}: {gib(one.lacking)} too much, most of it {largest}"


def what_would_fit(one: "ServePlan") -> list[tuple[str, "ServePlan"]]:
    """Changes after which it fits, the ones with the fewest changes first, then the fastest; [] if it fits.

    More chips, fewer sequences, weights or a cache of fewer bytes; or two of these.
    """
    if one.fits is not False:
        return []
    fewer: list[Change] = [dict(batch=one.largest_batch)] if one.largest_batch else []
    chips: list[Change] = [dict(tensor=one.tensor * times) for times in (2, 4, 8)]
    weights: list[Change] = [dict(weights=name) for name in ("fp8", "int4") if one.weights == "bf16"]
    smaller: list[Change] = [dict(cache="fp8")] if one.cache == "bf16" else []
    single = [*fewer, *chips, *weights, *smaller]
    double = [a | b for a, b in product([*chips, *weights], smaller + weights) if a.keys() != b.keys()]
    found: dict[str, ServePlan] = {}
    for change in (*single, *double):
        said = ", ".join(f"{name}={value!r}" for name, value in change.items())
        try:
            made = one.changed(**change)
        except ValueError:
            continue  # a degree that does not divide, or more chips than are joined
        if made.fits:
            found[said] = made
    return sorted(found.items(), key=lambda pair: (pair[0].count("="), pair[1].each_token))


def curve(plans: "list[ServePlan]") -> str:
    """Latency against throughput: a row for each batch."""
    head = (
        f"  {'sequences':>9} {'first token':>12} {'each token':>12} {'tokens/s':>10} {'memory':>12}  bound by"
    )
    rows = [
        f"  {one.batch:>9,} {seconds(one.first_token):>12} {seconds(one.each_token):>12} "
        f"{one.tokens_per_second:>10,.0f} {gib(one.peak_memory):>12}  {one.bound}"
        + ("" if one.fits is not False else ", does NOT fit")
        for one in plans
    ]
    return "\n".join(["latency against throughput", head, *rows])


def batches_up_to(most: int) -> tuple[int, ...]:
    """1, 4, 16, … and the most, at most twelve of them."""
    found = [4**power for power in range(11) if 4**power < most]
    return (*found, most)
