"""What of a plan `fmlab train` would not run as it was planned, told before a file is written."""

from collections.abc import Iterator

from fmlab.data.spans import span_lengths
from fmlab.parallel.layout import PRECISIONS
from fmlab.planner.own import OwnModels
from fmlab.planner.plan import Plan
from fmlab.planner.setup import STATES
from fmlab.planner.shapes import model_shape
from fmlab.planner.tables import gib, verdict
from fmlab.train import TrainConfig
from fmlab.train.setup import complete, state_bytes

#: makers of chips that fmlab has a backend for, and its name
BACKENDS = {"NVIDIA": "cuda", "AMD": "cuda", "Google": "tpu", "AWS": "neuron"}
#: chips that PyTorch sees as several devices -> what a device is called
DEVICES = {"trn1": "trn1-core", "trn2": "trn2-lnc2", "trn3": "trn3-lnc2", "tpu-v7": "tpu-v7-core"}
#: cores that are no device unless the runtime is told to split them
_SPLIT = {"trn2-core": "trn2-lnc2", "trn3-core": "trn3-lnc2"}


def check_plan(plan: Plan, engine: str, own: OwnModels | None = None) -> None:
    """Raise ValueError with all that `fmlab train` has no word for, or would do otherwise than planned."""
    reasons = [*_model(plan, own), *_numbers(plan), *_chip(plan, engine), *_memory(plan)]
    if reasons:
        raise ValueError(f"this plan of {plan.setup.shape.name} cannot be emitted: {'; '.join(reasons)}")


def check_config(plan: Plan, config: TrainConfig, own: OwnModels | None = None) -> None:
    """Raise ValueError unless `fmlab train` takes these settings on the plan's ranks, and plan and run agree
    on dropout."""
    _, recipe, _ = complete(config, plan.chips, None if own is None else own.on_meta(config.model))
    dropout = getattr(recipe.shape, "dropout", None) or 0.0
    if plan.setup.dropout != (dropout > 0):
        raise ValueError(
            f"{config.model} trains with dropout {dropout}, and the plan has dropout={plan.setup.dropout}; "
            f"plan with dropout={dropout > 0}"
        )


def row_tokens(plan: Plan) -> int:
    """seq_len of `fmlab train`. Raises ValueError for streams or lengths that its rows do not have."""
    lengths = dict(plan.setup.lengths)
    if len(lengths) == 1:
        return next(iter(lengths.values()))
    if lengths.keys() != {"input", "output"}:
        raise ValueError(f"fmlab train reads text, and {plan.setup.shape.name} takes {', '.join(lengths)}")
    target = span_lengths(lengths["input"])[1]
    if lengths["output"] != target:
        raise ValueError(
            f"fmlab train hides spans of the text: rows of {lengths['input']} tokens of input have {target} "
            f"of output; plan with seq_len input={lengths['input']},output={target}"
        )
    return lengths["input"]


def _model(plan: Plan, own: OwnModels | None) -> Iterator[str]:
    shape = plan.setup.shape
    if own is not None:
        own.shape(shape.name)  # raises where it is none of them
        return
    try:
        known = model_shape(shape.name) == shape
    except ValueError:
        known = False
    if not known:
        yield (
            "fmlab train makes its model from a preset of fmlab.models, and this shape is none; plan one, "
            "or train a model of your own with fmlab.train.train(config, model=…)"
        )


def _numbers(plan: Plan) -> Iterator[str]:
    setup = plan.setup
    if setup.precision not in PRECISIONS:
        yield (
            f"precision={setup.precision!r}: a layout trains in {' or '.join(PRECISIONS)} (fewer bits run on "
            "one device: fmlab train --numbers)"
        )
    if setup.states != STATES["fp32-16"]:
        yield (
            "states: fmlab train keeps weights and gradients in fp32, which takes other bytes a rank; plan "
            "with states='fp32-16'"
        )
    if setup.split_experts:
        yield "split_experts=True: fmlab train has whole experts on each tensor rank; divide them by expert="
    if setup.logits != "chunked":
        yield f"logits={setup.logits!r}: fmlab train makes them a few at a time; plan with logits='chunked'"


def _chip(plan: Plan, engine: str) -> Iterator[str]:
    chip = plan.machine.chip
    backend = BACKENDS.get(chip.vendor)
    if backend is None:
        yield f"chip {chip.name}: fmlab has no backend for chips of {chip.vendor}"
    elif chip.name.startswith("inf"):
        yield f"chip {chip.name}: its software serves models and does not train them"
    elif chip.name in DEVICES:
        device = DEVICES[chip.name]
        yield f"chip {chip.name}: PyTorch sees it as several devices, each a rank; plan with chip={device!r}"
    elif chip.name in _SPLIT:
        yield f"chip {chip.name}: a device is two of these by default; plan with chip={_SPLIT[chip.name]!r}"
    if backend == "tpu" and plan.chips > 1:
        yield (
            f"{plan.chips} ranks on TPUs are started by TorchTPU itself (python -m torch.tpu.distributed), "
            "for which there is no form here; a plan of one rank can be emitted"
        )
    if engine == "deepspeed" and backend not in (None, "cuda"):
        yield f"engine 'deepspeed' runs on GPUs here, not on {chip.name}"


def _memory(plan: Plan) -> Iterator[str]:
    if plan.capacity is None:
        return
    if plan.fits is False:
        yield f"it {verdict(plan)}; print the plan to see what would fit"
    # every rank builds the whole model before the layout divides it: fmlab.train.setup.check_memory
    parameters = plan.setup.shape.parameters
    start = max(4.0, state_bytes(plan.setup.layout)) * parameters
    if start > plan.capacity:
        yield (
            f"every rank of fmlab train builds the whole model in fp32 before it is divided: "
            f"{gib(start)} for {parameters / 1e9:.1f} billion parameters, and a {plan.machine.chip.name} has "
            f"{gib(plan.capacity)}; choose a smaller model"
        )
