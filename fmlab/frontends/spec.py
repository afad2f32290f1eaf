"""The one block and the one step that every front end is given: plain arrays, no framework.

The block is GPT-2's: norm, causal attention, add; norm, feed-forward with GELU (its tanh form), add. Names
and shapes of the weights are those of a layer of `fmlab.models.GPT`: a matrix is [out, in].

The step: loss = mean((block(x) - target)^2) over the whole batch, then w -= RATE * gradient.
"""

import numpy as np

ROWS, LENGTH, WIDTH, HEADS = 4, 8, 32, 4
EPS, RATE = 1e-5, 0.5
Arrays = dict[str, np.ndarray]


def weights(seed: int = 0) -> Arrays:
    """The weights by name, fp32, random."""
    shapes = {
        "attention_norm.weight": (WIDTH,),
        "attention_norm.bias": (WIDTH,),
        "attention.qkv.weight": (3 * WIDTH, WIDTH),
        "attention.qkv.bias": (3 * WIDTH,),
        "attention.output.weight": (WIDTH, WIDTH),
        "attention.output.bias": (WIDTH,),
        "mlp_norm.weight": (WIDTH,),
        "mlp_norm.bias": (WIDTH,),
        "mlp.up.weight": (4 * WIDTH, WIDTH),
        "mlp.up.bias": (4 * WIDTH,),
        "mlp.down.weight": (WIDTH, 4 * WIDTH),
        "mlp.down.bias": (WIDTH,),
    }
    random = np.random.default_rng(seed)
    made = {name: 0.1 * random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name in ("attention_norm.weight", "mlp_norm.weight"):
        made[name] += 1
    return made


def batch(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """x and target, [ROWS, LENGTH, WIDTH], fp32."""
    random = np.random.default_rng(seed)
    shape = (ROWS, LENGTH, WIDTH)
    return random.standard_normal(shape, dtype=np.float32), random.standard_normal(shape, dtype=np.float32)
