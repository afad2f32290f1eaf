"""Exercises of 1.13, rewriting, fusion and memory planning."""

from collections.abc import Sequence
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

# ---- a fusion rule -----------------------------------------------------------------------------------------

SECOND = (
    "the sum has a second reader, who still needs it: fused, it would be computed twice, or be gone",
    "a node's readers are node.users; the graph's output counts as one",
)
NO_BIAS = (
    "what is added there is not a bias [d] of the last dim: the kernel knows nothing else",
    "g.shape(node) is a node's shape, g.value(node) also of a plain number; compare with the last dim of x",
)
FACTOR = ("that addition has a factor: node.kwargs is not empty", "x + alpha * bias is not x + bias")


def _rules() -> list[tuple[str, Any, int, tuple[str, ...]]]:
    """(what, function of x [4,6], y [4,6], b [6], how often the rule applies, hints if it was applied
    more)."""
    import torch
    import torch.nn.functional as F

    return [
        ("gelu(x + b)", lambda x, y, b: F.gelu(x + b), 1, ()),
        ("gelu(b + x)", lambda x, y, b: F.gelu(b + x), 1, ()),
        ("gelu(x + b, tanh)", lambda x, y, b: F.gelu(x + b, approximate="tanh"), 1, ()),
        ("gelu(x + b) * gelu(y + b)", lambda x, y, b: F.gelu(x + b) * F.gelu(y + b), 2, ()),
        ("gelu(s) * sin(s), s = x + b", lambda x, y, b: F.gelu(s := x + b) * s.sin(), 0, SECOND),
        ("gelu(s) and s, s = x + b", lambda x, y, b: (F.gelu(s := x + b), s), 0, SECOND),
        ("gelu(x + y)", lambda x, y, b: F.gelu(x + y), 0, NO_BIAS),
        ("gelu(x + column)", lambda x, y, b: F.gelu(x + y[:, :1]), 0, NO_BIAS),
        ("gelu(x + 1)", lambda x, y, b: F.gelu(x + 1.0), 0, NO_BIAS),
        ("gelu(x + 2 b)", lambda x, y, b: F.gelu(torch.add(x, b, alpha=2)), 0, FACTOR),
        ("gelu(x * b)", lambda x, y, b: F.gelu(x * b), 0, ("that is no addition",)),
    ]


@exercise("1.13.1", "a fusion rule", returns=int)
def fuse_bias_gelu(answer: Answer) -> str:
    import torch

    from fmlab.compiler import Program, Runner, capture
    from fmlab.compiler import graph as g
    from fmlab.lab.written import bias_gelu

    random = torch.Generator().manual_seed(13)
    inputs = [torch.randn(size, generator=random) for size in ((4, 6), (4, 6), (6,))]
    rules = _rules()
    for what, fn, wanted, hints in rules:
        program = capture(fn, *inputs, backward=False)
        assert isinstance(program, Program)
        graph = program.forward.graph
        right = Runner(program.forward)(list(inputs))
        returned = answer(graph)
        graph.lint()
        made = sum(node.target is bias_gelu for node in graph.nodes)
        if made > wanted:
            raise NotYet(f"{what}: made {made} bias_gelu, not {wanted}", *(hints or ("once for each pair",)))
        if made < wanted:
            raise NotYet(
                f"{what}: made {made} bias_gelu, not {wanted}",
                "the bias may stand on either side of the +, and a graph may hold several pairs",
                "walk over list(graph.nodes), as nodes vanish on the way; look at both arguments of the sum",
            )
        if returned != made:
            raise NotYet(f"{what}: returned {returned}, made {made}", "return how many you made")
        got = Runner(program.forward)(list(inputs))
        for one, other in zip(got, right, strict=True):
            if not torch.allclose(one, other, atol=1e-6):
                raise NotYet(
                    f"{what}: the result is another one now",
                    "is this the same GELU? It has a keyword, approximate",
                    "pass the keywords of the GELU on: insert(node, bias_gelu, x, bias, **node.kwargs)",
                )
        if wanted and any(g.name(node) in ("add", "gelu") for node in g.calls(graph)):
            raise NotYet(
                f"{what}: the old nodes are still there",
                "what nobody reads still runs: erase the addition too, behind its reader",
                "replace() drops the GELU; graph.erase_node(total) drops the addition",
            )
    return f"{len(rules)} graphs: 5 pairs fused, 7 cases refused"


# ---- a memory plan -----------------------------------------------------------------------------------------

Lives = Sequence[tuple[int, int, int]]  # (nbytes, birth, death)


def _meet(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[1] <= other[2] and other[1] <= one[2]


def _fit(lives: Lives, order: Sequence[int], gaps: bool = True) -> list[int]:
    """Place in this order, each at the lowest fitting offset; without gaps above all that it meets."""
    at: dict[int, int] = {}
    for i in order:
        offset = 0
        for j in sorted((j for j in at if _meet(lives[i], lives[j])), key=at.__getitem__):
            if gaps and offset + lives[i][0] <= at[j]:
                break
            offset = max(offset, at[j] + lives[j][0])
        at[i] = offset
    return [at[i] for i in range(len(lives))]


def _block(lives: Lives, offsets: Sequence[int]) -> int:
    return max(offset + life[0] for offset, life in zip(offsets, lives, strict=True))


def _largest_first(lives: Lives) -> list[int]:
    return sorted(range(len(lives)), key=lambda i: -lives[i][0])


def _programs() -> list[Lives]:
    import random

    draw = random.Random(13)
    found: list[Lives] = [
        [(100, 0, 3)],
        [(60, 0, 1), (64, 3, 4)],
        [(64, 0, 1), (64, 1, 2), (64, 2, 3)],
        [(10, 0, 9), (80, 1, 2), (90, 3, 4)],
    ]
    for count in (8, 12, 20, 40):
        sizes = draw.sample(range(1, 400), count)
        births = [draw.randrange(0, 2 * count) for _ in range(count)]
        found.append([(n, b, b + draw.randrange(1, 8)) for n, b in zip(sizes, births, strict=True)])
    return found


@exercise("1.13.2", "a memory plan", returns=list)
def place(answer: Answer) -> str:
    programs = _programs()
    for lives in programs:
        got = answer(list(lives))
        what = f"for {len(lives)} tensors" if len(lives) > 5 else f"for {list(lives)}"
        if len(got) != len(lives) or any(not isinstance(o, int) or o < 0 for o in got):
            raise NotYet(
                f"got {str(got)[:60]} {what}",
                "one offset for each tensor, in the order given: whole bytes from 0",
            )
        _check_apart(lives, got, what)
        best = _fit(lives, _largest_first(lives))
        block, budget = _block(lives, got), _block(lives, best)
        if block <= budget:
            continue
        over = f"a block of {block:,} bytes {what}; the budget is {budget:,}"
        if block == _block(lives, _fit(lives, _largest_first(lives), gaps=False)):
            raise NotYet(
                over,
                "there is a gap below: take the lowest offset where it fits, also between two neighbours",
                "walk over those that it meets by offset; stop where the next one begins high enough",
            )
        if block == sum(life[0] for life in lives):
            raise NotYet(
                over, "nothing is reused: two tensors that never live at one step may share their place"
            )
        raise NotYet(
            over,
            "in which order do you place them? Small ones placed early leave no room for a large one",
            "place the largest first",
        )
    return f"{len(programs)} programs, none above its budget"


def _check_apart(lives: Lives, got: list[int], what: str) -> None:
    for j, other in enumerate(lives):
        for i, one in enumerate(lives[:j]):
            apart = got[i] + one[0] <= got[j] or got[j] + other[0] <= got[i]
            if apart or not _meet(one, other):
                continue
            step = max(one[1], other[1])
            pair = f"tensors {i} {one} at {got[i]} and {j} {other} at {got[j]} overlap at step {step}, {what}"
            if min(one[2], other[2]) == step:
                raise NotYet(
                    pair,
                    "at its death a tensor is still read, and the one born there is written: both live",
                    "they meet if birth <= other death and other birth <= death, with equality",
                )
            raise NotYet(pair, "both are alive then: compare with all that it meets, not only with the last")


# ---- an order ----------------------------------------------------------------------------------------------

Node = tuple[str, str, list[str]]


def _orders() -> list[list[Node]]:
    """Backward passes: computations, and messages that are started and waited for at once."""
    plain: list[Node] = [
        ("g2", "compute", []), ("s2", "start", ["g2"]), ("w2", "wait", ["s2"]),
        ("g1", "compute", ["g2"]), ("s1", "start", ["g1"]), ("w1", "wait", ["s1"]),
        ("g0", "compute", ["g1"]), ("norm", "compute", []), ("update", "compute", ["w2", "w1"]),
    ]  # fmt: skip
    late: list[Node] = [
        ("a", "compute", []), ("b", "compute", ["a"]), ("c", "compute", ["b"]),
        ("s", "start", ["a"]), ("w", "wait", ["s"]), ("d", "compute", ["c"]),
        ("e", "compute", ["w", "d"]), ("f", "compute", ["e"]), ("t", "start", ["c", "f"]),
        ("v", "wait", ["t"]),
    ]  # fmt: skip
    between: list[Node] = [
        ("g", "compute", []), ("s", "start", ["g"]), ("w", "wait", ["s"]), ("h", "compute", ["w"]),
        ("i", "compute", ["h"]), ("t", "start", ["g", "h"]), ("u", "wait", ["t"]), ("j", "compute", ["i"]),
        ("k", "compute", ["j", "w", "u"]),
    ]  # fmt: skip
    return [plain, late, between]


def _hidden(order: Sequence[str], program: Sequence[Node]) -> dict[str, int]:
    """For each start: computations between it and its wait."""
    place = {name: at for at, name in enumerate(order)}
    kinds = {name: kind for name, kind, _ in program}
    found = {}
    for name, kind, reads in program:
        if kind == "wait":
            inside = order[place[reads[0]] : place[name]]
            found[reads[0]] = sum(kinds[one] == "compute" for one in inside)
    return found


def _most(program: Sequence[Node]) -> dict[str, int]:
    work = [name for name, kind, _ in program if kind == "compute"]
    reads = {name: given for name, _, given in program}
    found = {}
    for name, kind, given in program:
        if kind == "wait":
            first = min((at for at, one in enumerate(work) if name in reads[one]), default=len(work))
            ready = max((work.index(one) + 1 for one in reads[given[0]]), default=0)
            found[given[0]] = first - ready
    return found


@exercise("1.13.3", "overlap, an order", returns=list)
def overlap(answer: Answer) -> str:
    programs = _orders()
    for program in programs:
        got = answer([(name, kind, list(reads)) for name, kind, reads in program])
        names = [name for name, _, _ in program]
        what = f"got {' '.join(map(str, got))}"
        if sorted(map(str, got)) != sorted(names):
            raise NotYet(what, f"return each of {' '.join(names)} once")
        for name, kind, reads in program:
            for given in reads:
                if got.index(given) > got.index(name):
                    hint = {
                        "compute": "a wait comes before the first that reads it: nothing has arrived earlier",
                        "start": "a message starts behind everything that it carries",
                        "wait": "a wait comes behind its start",
                    }[kind]
                    raise NotYet(f"{what}: {name} comes before {given}, which it reads", hint)
        work = [name for name, kind, _ in program if kind == "compute"]
        if [name for name in got if name in work] != work:
            raise NotYet(what, "computations keep their order among themselves")
        hidden, most = _hidden(got, program), _most(program)
        for start, count in most.items():
            if hidden[start] < count:
                early = next(name for name, kind, reads in program if kind == "wait" and reads == [start])
                raise NotYet(
                    f"{what}: {hidden[start]} computations between {start} and {early}, {count} are possible",
                    "start as early as possible: directly behind the last it reads; wait as late as possible",
                    "directly before the first computation that reads the wait, or at the end",
                )
    return f"{len(programs)} programs, every message behind as much work as can be"
