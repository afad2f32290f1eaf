"""What tensor parallelism sends, from shapes alone: the payload of each kind of collective in a step.

S = batch x length x hidden x bytes of an element, the stream of one micro-batch. A pair of matrices
(attention, or a feed-forward network) costs, forward and backward together:

    tensor parallel     2 all-reduces of S: g, and f's in backward
    sequence parallel   3 all-gathers and 2 reduce-scatters of S: f and g in forward; in backward g's
                        gather, f's reduce-scatter, and f's input gathered again instead of kept

A ring all-reduce sends twice what an all-gather or a reduce-scatter does, so that is 4 to 5 on the wire; the
fifth is the price of not keeping the gathered input, and travels behind a product. Payloads are of whole
tensors, as fmlab.meter.traffic counts them.
"""

from collections import Counter
from collections.abc import Mapping

from fmlab.parallel.ddp.cost import ring_bytes

Payload = Mapping[str, int]  # collective -> bytes


def pair_payload(
    batch: int,
    length: int,
    hidden: int,
    tensor: int,
    sequence_parallel: bool = False,
    itemsize: int = 4,
    pairs: int = 2,
) -> Counter[str]:
    """Payload of `pairs` pairs of matrices, forward and backward: a layer of a GPT, BERT or Llama has 2, a
    decoder layer of T5 3 (the gradient of what the encoder made is summed once for all of them)."""
    if sequence_parallel:
        stream = _stream(batch, length, hidden, itemsize, tensor)
        return Counter(all_gather=3 * pairs * stream, reduce_scatter=2 * pairs * stream)
    return Counter(all_reduce=2 * pairs * _stream(batch, length, hidden, itemsize))


def language_model_payload(
    layers: int,
    batch: int,
    length: int,
    hidden: int,
    tensor: int,
    sequence_parallel: bool = False,
    itemsize: int = 4,
    replicated: int = 0,
) -> Counter[str]:
    """Payload of one micro-batch through a decoder with its embedding and its loss over a divided vocabulary.

    The loss takes three numbers of each token, whatever the vocabulary. replicated: elements of the norms
    and row biases in the stream, whose gradients are summed once a step under sequence parallelism.
    """
    numbers = max(itemsize, 4)  # the softmax is in fp32 or wider
    whole = _stream(batch, length, hidden, itemsize)
    payload = Counter(all_reduce=whole)  # the look-up
    payload += pair_payload(batch, length, hidden, tensor, sequence_parallel, itemsize, 2 * layers)
    if not sequence_parallel:
        return payload + Counter(all_reduce=whole + 3 * batch * length * numbers)
    cut = _stream(batch, length, hidden, itemsize, tensor)
    payload += Counter(all_gather=cut)  # the gradient of the look-up
    payload += Counter(all_gather=cut, reduce_scatter=cut)  # f of the output matrix
    tokens = cut // (hidden * itemsize)
    return payload + Counter(all_reduce=3 * tokens * numbers + replicated * itemsize)


def wire_bytes(payload: Payload, tensor: int) -> float:
    """Bytes that each rank sends for a payload by ring algorithms."""
    return sum(ring_bytes(op, size, tensor) for op, size in payload.items())


def _stream(batch: int, length: int, hidden: int, itemsize: int, parts: int = 1) -> int:
    return batch * -(-length // parts) * parts * hidden * itemsize
