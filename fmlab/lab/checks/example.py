"""The checker of the example notebook (tests/notebooks/fixtures): copy its shape for a new one."""

from fmlab.lab.exercises import Answer, NotYet, exercise

HIDDEN = [(7, 11, True), (5, 3, False), (1, 9, True)]  # shapes that the learner does not see


@exercise("9.1.1", "count without building", returns=int)
def count_linear(answer: Answer) -> str:
    for features_in, features_out, bias in HIDDEN:
        right = features_in * features_out + (features_out if bias else 0)
        got = answer(features_in, features_out, bias)
        what = f"for ({features_in}, {features_out}, bias={bias}) it says {got}"
        if got == right:
            continue
        if bias and got == features_in * features_out:
            raise NotYet(what, "you forgot the biases", "add one number for each output")
        if not bias:
            raise NotYet(what, "what does bias=False change?", "without a bias only the matrix is trained")
        raise NotYet(what, "count the matrix, then the vector", "there is one bias for each output")
    return f"{len(HIDDEN)} shapes, with and without bias"
