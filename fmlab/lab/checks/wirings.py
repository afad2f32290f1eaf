"""Checkers of notebook 1.4."""

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.4.1", "what T5's decoder reads")
def decoder_inputs(answer: Answer) -> str:
    import torch

    cases = (
        ([[5, 6, 7, 1], [8, 9, 1, -100]], 0),
        ([[3, 1, -100, -100, -100]], 0),
        ([[4, 2, 6], [7, -100, 9]], 2),
    )
    for rows, start in cases:
        labels = torch.tensor(rows)
        before = labels.clone()
        moved = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
        right = moved.masked_fill(moved == -100, start)
        got = answer(labels, start)
        if not torch.equal(labels, before):
            raise NotYet(
                "the labels are other ones now", "you changed the labels themselves", "make a new one"
            )
        shape = list(getattr(got, "shape", []))
        if shape != list(right.shape):
            raise NotYet(f"got {shape} for {list(right.shape)}", "it must be as long as the labels")
        if torch.equal(got, right):
            continue
        what = f"got {got[0].tolist()} for the labels {rows[0]}, start {start}"
        if (got == -100).any():
            raise NotYet(
                what, "-100 is a mark, no piece has the number -100", "read the start token in its place"
            )
        if torch.equal(got, labels.masked_fill(labels == -100, start)):
            raise NotYet(
                what,
                "not moved: it would read the piece that it must predict",
                "begin with the start token, leave out the last label",
            )
        if torch.equal(got[:, :-1], labels.masked_fill(labels == -100, start)[:, 1:]):
            raise NotYet(what, "moved the wrong way: it reads the future", "to the right, not to the left")
        if start and (got == 0).any():  # no label is 0 there
            raise NotYet(what, "`start` is not always 0: use the argument")
        raise NotYet(what, f"the first row must be {right[0].tolist()}")
    return "three batches, two start tokens"


def _corrupt(tokens: list[str], spans: list[tuple[int, int]]) -> tuple[list[str], list[str]]:
    shown: list[str] = []
    target: list[str] = []
    at = 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], f"<{i}>"]
        target += [f"<{i}>", *tokens[first:stop]]
        at = stop
    return [*shown, *tokens[at:], "</s>"], [*target, "</s>"]


@exercise("1.4.2", "hide the spans", returns=tuple)
def corrupt(answer: Answer) -> str:
    tokens = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    for spans in ([(2, 4), (8, 9)], [(0, 1), (3, 6), (7, 10)], [(9, 10)]):
        wanted = _corrupt(tokens, spans)
        got = answer(list(tokens), list(spans))
        if len(got) != 2:
            raise NotYet(f"got {len(got)} lists", "return two: the input and the target")
        shown, target = (list(part) for part in got)
        if (shown, target) == wanted:
            continue
        what = f"spans {spans}: got {' '.join(map(str, shown))} and {' '.join(map(str, target))}"
        if "</s>" not in shown[-1:] or "</s>" not in target[-1:]:
            raise NotYet(what, "both end with </s>: how else would the decoder know when to stop?")
        names = [f"<{i}>" for i in range(len(spans))]
        if not any(name in target for name in names):
            raise NotYet(
                what, "the target does not say which span is which", "write the sentinel before what it hides"
            )
        if len(spans) > 1 and set(names) - set(shown):
            raise NotYet(what, "sentinels are numbered: <0>, <1>, …", "a new one for each span")
        if any(shown.count(name) > 1 for name in names):
            raise NotYet(
                what, "one sentinel a span, however long the span is", "its length is a secret of the target"
            )
        longer = _corrupt(tokens, [(first, min(stop + 1, len(tokens))) for first, stop in spans])
        if (shown, target) == longer:
            raise NotYet(
                what,
                "a piece too many is hidden in each span",
                "stop is exclusive, as in a slice: tokens[first:stop] leaves tokens[stop] in the text",
            )
        if shown != wanted[0] and shown[:-1] == wanted[0][: len(shown) - 1]:
            raise NotYet(what, "the text after the last span is kept, too")
        raise NotYet(
            what,
            "spans are tokens[first:stop]: stop is exclusive, and what stands between two spans stays",
            "write what comes before the span, its sentinel, and go on at stop; the target gets the rest",
        )
    return "three texts, spans at both ends too"


@exercise("1.4.3", "a fourth wiring")
def prefix_mask(answer: Answer) -> str:
    import torch

    for length, prefix in ((6, 3), (5, 1), (4, 4), (7, 2)):
        right = torch.ones(length, length, dtype=torch.bool).tril()
        right[:prefix, :prefix] = True
        got = answer(length, prefix)
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {list(getattr(got, 'shape', []))}", f"the result is a tensor [{length}, {length}]"
            )
        got = got.bool()
        if torch.equal(got, right):
            continue
        what = f"{int((got != right).sum())} of {length * length} pairs are wrong for a prefix of {prefix}"
        if not got.diagonal().all():
            raise NotYet(what, "a piece may look at itself", "tril() without an argument")
        if got[-1].sum() < length:
            raise NotYet(what, "rows are queries: the last one sees everything", "tril, not triu")
        if not got[:prefix, :prefix].all():
            raise NotYet(what, "the prefix is read both ways", "fill its square with True")
        if got[:prefix, prefix:].any():
            raise NotYet(
                what, "the prefix sees what it must write: that is a leak", "only columns of the prefix"
            )
        raise NotYet(what, "causal, and a full square for the prefix")
    return "four lengths and prefixes"
