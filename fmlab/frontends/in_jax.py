"""The block in JAX, as a jaxpr, and the step on two devices by a sharding annotation.

A process of .venv-frontends runs it: `python -m fmlab.frontends.in_jax`.
"""

from typing import Any

import numpy as np

from fmlab.frontends import answer
from fmlab.frontends.spec import EPS, HEADS, LENGTH, RATE, ROWS, WIDTH, Arrays, batch, weights

DEVICES = 2


# region block
def block(w: Any, x: Any) -> Any:
    """x [b,l,d] -> [b,l,d], written as JAX programs are: a pure function of its weights."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str) -> Any:
        mean, spread = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(spread + EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    rows, length, width = x.shape
    qkv = linear(norm(x, "attention_norm"), "attention.qkv").reshape(rows, length, 3, HEADS, -1)
    query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # [b,h,l,k]
    scores = query @ key.swapaxes(2, 3) / np.sqrt(width // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = (jax.nn.softmax(scores, -1) @ value).swapaxes(1, 2).reshape(rows, length, width)
    x = x + linear(mixed, "attention.output")
    return x + linear(jax.nn.gelu(linear(norm(x, "mlp_norm"), "mlp.up")), "mlp.down")


# endregion


# region step
def step(w: Any, x: Any, target: Any) -> Any:
    """The updated weights. It says nothing of devices: where arrays lie decides what the compiler adds."""
    import jax

    def loss(w: Any) -> Any:
        return ((block(w, x) - target) ** 2).mean()

    return jax.tree.map(lambda p, g: p - RATE * g, w, jax.grad(loss)(w))


def on_two_devices(w: Arrays, x: np.ndarray, target: np.ndarray) -> tuple[Any, str]:
    """The updated weights and the compiled program: rows over a mesh axis "data", weights on every device."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    placed = jax.device_put((w, x, target), (everywhere, rows, rows))
    compiled = jax.jit(step, out_shardings=everywhere).lower(*placed).compile()
    return compiled(*placed), compiled.as_text()


# endregion


def nodes(jaxpr: Any) -> list[dict[str, Any]]:
    """The equations of a jaxpr, those of the functions that it calls in their place."""
    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}

    def name_of(variable: Any) -> str | None:
        return None if hasattr(variable, "val") else names.get(variable)  # a literal has a value

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if inner is not None:
                inner = getattr(inner, "jaxpr", inner)
                for variable, given in zip(inner.invars, equation.invars, strict=True):
                    if (known := name_of(given)) is not None:
                        names[variable] = known
                walk(inner)
                for variable, made in zip(equation.outvars, inner.outvars, strict=True):
                    if (known := name_of(made)) is not None:
                        names[variable] = known
                continue
            name = f"{equation.primitive.name}_{len(found)}"
            inputs = [known for v in equation.invars if (known := name_of(v)) is not None]
            shape = equation.outvars[0].aval
            found.append(answer.node(name, equation.primitive.name, inputs, shape.shape, str(shape.dtype)))
            for variable in equation.outvars:
                names[variable] = name

    for i, variable in enumerate(jaxpr.invars):
        names[variable] = f"input_{i}"
        found.append(answer.node(f"input_{i}", "input", [], variable.aval.shape, str(variable.aval.dtype)))
    walk(jaxpr)
    return found


def main() -> None:
    """Write the answer to standard output."""
    import os

    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    w, (x, target) = weights(), batch()
    assert x.shape == (ROWS, LENGTH, WIDTH)
    jaxpr = jax.make_jaxpr(block)(w, x)
    updated, program = on_two_devices(w, x, target)
    answer.send(
        versions={"jax": jax.__version__},
        nodes=nodes(jaxpr.jaxpr),
        text=str(jaxpr),
        output=np.asarray(block(w, x)),
        updated={name: np.asarray(value) for name, value in updated.items()},
        program=program,
    )


if __name__ == "__main__":
    main()
