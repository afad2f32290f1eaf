"""Checkers of notebook 1.7."""

from fmlab.lab.exercises import Answer, NotYet, exercise

IGNORE = -100
PAIRS = (([11, 12, 13], [21, 22]), ([14], [23, 24, 25, 26]), ([15, 16, 17, 18, 19], [27]))


@exercise("1.7.1", "labels on the response only", returns=tuple)
def response_only(answer: Answer) -> str:
    end = 9
    for prompt, response in PAIRS:
        ids = [*prompt, *response, end]
        right = [IGNORE] * (len(prompt) - 1) + [*response, end]
        got = answer(list(prompt), list(response), end)
        what = f"got {got} for prompt {prompt}, response {response}, end {end}"
        if len(got) != 2 or not all(isinstance(part, list) for part in got):
            raise NotYet(what, "return two lists: input_ids and labels")
        inputs, labels = got
        if len(inputs) != len(labels):
            raise NotYet(what, "each input needs a label: both lists have the same length")
        if inputs == ids[:-1] and labels == right:
            continue
        if end not in labels:
            raise NotYet(
                what, "the model must learn where to stop", "the last label is the end-of-text token"
            )
        if inputs == ids and labels == [IGNORE] * len(prompt) + [*response, end]:
            raise NotYet(
                what,
                "labels are shifted already: the label is the token that FOLLOWS the input",
                "the last token of the prompt predicts the first of the response",
            )
        if inputs != ids[:-1]:
            raise NotYet(what, "the inputs are prompt and response; nothing follows the end of the text")
        if labels == ids[1:]:
            raise NotYet(
                what, "this also trains the model to write prompts", "-100 where a prompt is asked for"
            )
        if labels == [IGNORE] * len(prompt) + ids[len(prompt) + 1 :]:
            raise NotYet(
                what,
                "the first token of the response is never asked for",
                "the last token of the prompt predicts it",
            )
        raise NotYet(what, "hide the prompt's tokens but the first, then response and end")
    return f"{len(PAIRS)} pairs"


@exercise("1.7.2", "expected calibration error", returns=float)
def calibration_error(answer: Answer) -> str:
    import torch

    from fmlab.train.metrics import Calibration

    generator = torch.Generator().manual_seed(3)
    for count, bins, skill in ((400, 10, 1.0), (150, 5, 0.5), (60, 8, 1.6), (12, 10, 1.0)):
        confidence = torch.rand(count, generator=generator) ** 0.5 * 0.98 + 0.01
        right = torch.rand(count, generator=generator) < (confidence * skill).clamp(max=1)
        measure = Calibration(bins)
        measure.add_confidences(confidence, right)
        samples, mean, accuracy = measure.bins
        full = samples > 0
        got = answer(confidence.clone(), right.clone(), bins)
        if abs(got - measure.error) < 1e-4:
            continue
        what = f"got {got:.4f} instead of {measure.error:.4f} for {count} samples in {bins} bins"
        if got != got:
            raise NotYet(what, "the mean of nothing is not a number", "skip bins without a sample")
        if abs(got - float((accuracy - mean)[full].abs().mean())) < 1e-4:
            raise NotYet(
                what, "bins with many samples weigh more", "weight each gap by its share of the samples"
            )
        if abs(abs(got) - abs(measure.overconfidence)) < 1e-4:
            raise NotYet(
                what,
                "gaps of different sign cancel: take the absolute value of each bin's gap",
                "abs() inside the sum over bins",
            )
        if abs(got - float((confidence - right.float()).abs().mean())) < 1e-4:
            raise NotYet(
                what,
                "one sample is right or wrong, never 70% right: compare the means of a bin",
                "first average confidence and rightness in each bin",
            )
        if abs(got - measure.error * count) < 1e-2:
            raise NotYet(what, "a share of samples is missing: divide by how many there are")
        raise NotYet(what, "bin by confidence; gap of the means in each bin; mean weighted by samples")
    return "four sets of answers"


@exercise("1.7.3", "merge a low-rank update")
def merge(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(4)
    for outputs, inputs, rank, alpha in ((6, 4, 2, 5.0), (5, 5, 3, 12.0), (3, 8, 1, 0.5)):
        weight, a, b = (
            torch.randn(*shape, generator=generator)
            for shape in ((outputs, inputs), (rank, inputs), (outputs, rank))
        )
        given = weight.clone()
        got = answer(given, a.clone(), b.clone(), alpha)
        right = weight + alpha / rank * b @ a
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {list(getattr(got, 'shape', []))}", f"the merged weight is {list(right.shape)}"
            )
        if not torch.equal(given, weight):
            raise NotYet(
                "the weight that was given has changed",
                "leave the base as it is: it may serve other adapters",
                "weight + ..., not weight += ...",
            )
        if torch.allclose(got, right, atol=1e-5):
            continue
        what = f"differs by {(got - right).abs().max():.2g} for rank {rank}, alpha {alpha:g}"
        for scale, hint in (
            (1.0, "the update is scaled before it is added"),
            (alpha, "alpha alone is not the scale: a larger rank must not mean a larger step"),
            (rank / alpha, "the scale is upside down"),
        ):
            if torch.allclose(got, weight + scale * b @ a, atol=1e-5):
                raise NotYet(what, hint, "alpha / rank")
        for size in (inputs, outputs):
            if torch.allclose(got, weight + alpha / size * b @ a, atol=1e-5):
                raise NotYet(what, "the scale takes another size for r", "r is len(a): the rows of a")
        raise NotYet(what, "W + (alpha / rank) * B @ A, B first")
    return "three shapes"
