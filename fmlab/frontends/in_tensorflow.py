"""The block in TensorFlow, as a graph that `tf.function` traced, and the step on two devices by a strategy.

A process of .venv-frontends runs it: `python -m fmlab.frontends.in_tensorflow`.
"""

from typing import Any

import numpy as np

from fmlab.frontends import answer
from fmlab.frontends.spec import EPS, HEADS, LENGTH, RATE, ROWS, WIDTH, Arrays, batch, weights

DEVICES = 2


# region block
def block(w: Any, x: Any) -> Any:
    """x [b,l,d] -> [b,l,d]; under `tf.function` each call adds a node to a graph."""
    import tensorflow as tf

    def norm(x: Any, name: str) -> Any:
        mean, spread = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(spread + EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return tf.linalg.matmul(x, w[f"{name}.weight"], transpose_b=True) + w[f"{name}.bias"]

    rows, length, width = x.shape
    qkv = tf.reshape(linear(norm(x, "attention_norm"), "attention.qkv"), (rows, length, 3, HEADS, -1))
    query, key, value = tf.unstack(tf.transpose(qkv, (2, 0, 3, 1, 4)))  # [b,h,l,k]
    scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(width // HEADS).astype(np.float32)
    causal = np.tril(np.ones((length, length), bool))
    scores = tf.where(causal, scores, -np.inf)
    mixed = tf.transpose(tf.nn.softmax(scores) @ value, (0, 2, 1, 3))
    x = x + linear(tf.reshape(mixed, (rows, length, width)), "attention.output")
    return x + linear(tf.nn.gelu(linear(norm(x, "mlp_norm"), "mlp.up"), approximate=True), "mlp.down")


# endregion


# region step
def on_two_devices(w: Arrays, x: np.ndarray, target: np.ndarray) -> tuple[Arrays, str]:
    """The updated weights and the graph that ran: variables made under a strategy are mirrored on each
    device, and the optimizer adds up their gradients, so that each loss is a share of the whole."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(DEVICES)])
    with strategy.scope():
        variables = {name: tf.Variable(value, name=name.replace(".", "_")) for name, value in w.items()}
        optimizer = tf.keras.optimizers.SGD(RATE)
        optimizer.build(list(variables.values()))
    data = tf.data.Dataset.from_tensors((x, target)).unbatch().batch(len(x), drop_remainder=True)
    rows = next(iter(strategy.experimental_distribute_dataset(data)))

    def on_a_device(x: Any, target: Any) -> None:
        with tf.GradientTape() as tape:
            share = tf.reduce_mean((block(variables, x) - target) ** 2) / DEVICES
        gradients = tape.gradient(share, list(variables.values()))
        optimizer.apply_gradients(zip(gradients, variables.values(), strict=True))

    @tf.function
    def step(rows: Any) -> None:
        strategy.run(on_a_device, args=rows)

    program = step.get_concrete_function(rows).graph
    step(rows)
    text = "\n".join(f"{op.name} = {op.type}  on {op.device or 'any'}" for op in _all(program))
    return {name: variable.numpy() for name, variable in variables.items()}, text


# endregion


def _all(graph: Any) -> list[Any]:
    """The operations of a graph and of the functions that it holds."""
    found = list(graph.get_operations())
    for function in graph._functions.values() if isinstance(graph._functions, dict) else []:
        found += getattr(getattr(function, "graph", None), "get_operations", list)()
    return found


def nodes(graph: Any) -> list[dict[str, Any]]:
    """The operations of a `tf.Graph`."""
    found = []
    for op in graph.get_operations():
        outputs = list(op.outputs)
        shape = outputs[0].shape.as_list() if outputs and outputs[0].shape.rank is not None else None
        dtype = outputs[0].dtype.name if outputs else ""
        kind = "input" if op.type == "Placeholder" else op.type
        found.append(answer.node(op.name, kind, [tensor.op.name for tensor in op.inputs], shape, dtype))
    return found


def main() -> None:
    """Write the answer to standard output."""
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import tensorflow as tf

    (chip,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(chip, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    w, (x, target) = weights(), batch()
    assert x.shape == (ROWS, LENGTH, WIDTH)
    captured = tf.function(block).get_concrete_function(
        {name: tf.TensorSpec(value.shape, tf.float32, name) for name, value in w.items()},
        tf.TensorSpec(x.shape, tf.float32, "x"),
    )
    found = nodes(captured.graph)
    updated, program = on_two_devices(w, x, target)
    answer.send(
        versions={"tensorflow": tf.__version__},
        nodes=found,
        text="\n".join(f"{n['name']} = {n['op']}({', '.join(n['inputs'])})  {n['shape']}" for n in found),
        output=block(w, tf.constant(x)).numpy(),
        updated=updated,
        program=program,
    )


if __name__ == "__main__":
    main()
