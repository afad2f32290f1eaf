"""What a resumed run may change of its settings: a table of every one of them.

SAME   must be as they were: the weights, the data or the meaning of the state would not fit
SAID   may change, and what is learnt from there on changes with them: the run says so
FREE   may change, and nothing that is learnt depends on them
"""

import warnings
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal

from fmlab.train.config import TrainConfig

Rule = Literal["same", "said", "free"]

#: setting -> (rule, why)
RULES: Mapping[str, tuple[Rule, str]] = {
    "model": ("same", "the weights are of that model"),
    "corpus": ("free", "a name or a path: the text itself is compared, by its fingerprint"),
    "init": ("same", "it is where the weights began"),
    "teacher": ("same", "it is what the losses are measured by"),
    "tokenizer": ("free", "a path: the tokens themselves are compared, by their fingerprint"),
    "objective": ("same", "the losses so far are of that objective"),
    "steps": ("said", "the schedule of the learning rate is cut to the new number"),
    "batch_size": ("same", "the next batch would not be the one after the last"),
    "seq_len": ("same", "the next batch would not be the one after the last"),
    "pack_documents": ("same", "the next batch would not be the one after the last"),
    "lr": ("said", "steps from here on are of another size"),
    "min_lr_ratio": ("said", "the schedule of the learning rate changes"),
    "warmup": ("said", "the schedule of the learning rate changes"),
    "weight_decay": ("said", "the optimizer goes on with other settings"),
    "beta1": ("said", "the optimizer goes on with other settings"),
    "beta2": ("said", "the optimizer goes on with other settings"),
    "clip": ("said", "the optimizer goes on with other settings"),
    "layout": (
        "said",
        "sums are added up in another order: the end is within a tolerance, not bitwise equal",
    ),
    "engine": (
        "said",
        "sums are added up in another order: the end is within a tolerance, not bitwise equal",
    ),
    "backend": ("said", "another device rounds otherwise: the end is within a tolerance, not bitwise equal"),
    "mask_versions": ("same", "the masks of the next epochs would be others"),
    "optimizer": ("same", "the optimizer's state is of another kind"),
    "numbers": ("same", "weights and optimizer state are kept in those numbers"),
    "seed": ("same", "the order of the data comes from it"),
    "validation": ("same", "text that was trained on would become validation text"),
    "eval_every": ("free", "measuring changes no weight"),
    "eval_batches": ("said", "later validation losses are of other batches than earlier ones"),
    "out": ("free", "a run's folder may be moved"),
    "save_every": ("free", "saving changes no weight"),
    "keep": ("free", "saving changes no weight"),
    "keep_every": ("free", "saving changes no weight"),
    "async_save": ("free", "saving changes no weight"),
    "resume": ("free", "it is how this run began"),
    "on_bad_step": ("said", "bad steps from here on are dealt with otherwise"),
    "spike_factor": ("said", "other losses from here on are spikes"),
    "max_bad_steps": ("free", "it only says when the run ends"),
    "leave_out": ("said", "other batches are left out after a bad step"),
    "compare_replicas": ("free", "comparing changes no weight"),
    "collective_timeout": ("free", "it only says when the run ends"),
    "check_collectives": ("free", "comparing changes no weight"),
    "stragglers": ("free", "output"),
    "log_every": ("free", "output"),
    "tensorboard": ("free", "output"),
    # of runs on images
    "image_size": ("same", "the next batch would not be the one after the last"),
    "autoencoder": ("same", "the latents are its own"),
    "kl_weight": ("said", "the loss is another"),
    "prediction": ("same", "the weights predict that"),
    "zero_terminal_snr": ("same", "the weights were trained on that noise"),
    "min_snr_gamma": ("said", "the loss is another"),
    "drop_captions": ("same", "the next batch would not be the one after the last"),
    "ema": ("same", "the average of the weights has that decay"),
    "lora_rank": ("same", "the weights are of that shape"),
    "learn_word": ("same", "the weights are those of that word"),
}


# region check
def check_settings(before: Mapping[str, Any], now: TrainConfig) -> list[str]:
    """Compare a checkpoint's settings with those of now; a sentence for each difference that is to be said.

    Both are complete: the layout is for the ranks there were, lr is a number, the objective is named. Raises
    ValueError that names every setting that must be as it was.
    """
    current = now.to_dict()
    pairs = {
        each.name: (_plain(before.get(each.name, _default(each))), _plain(current[each.name]))
        for each in fields(now)
    }
    wrong, said = [], []
    for name, (old, new) in pairs.items():
        if old == new:
            continue
        rule, why = RULES.get(name, ("same", "nothing is known of it"))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            keys = [key for key in new if old.get(key) != new[key]]
            old, new = ({key: side.get(key) for key in keys} for side in (old, new))
        line = f"{name}: {old!r} in the checkpoint, {new!r} now ({why})"
        if rule == "same":
            wrong.append(line)
        elif rule == "said":
            said.append(line)
    if wrong:
        raise ValueError(f"cannot resume with other settings; {'; '.join(wrong)}. Set them as they were")
    return said


# endregion


def say(said: list[str]) -> None:
    """Warn of settings that have changed, if any."""
    if said:
        warnings.warn(f"the run goes on with other settings; {'; '.join(said)}", stacklevel=2)


def _default(each: "Field[Any]") -> Any:
    """What a checkpoint that does not know a setting was trained with."""
    if each.default is not MISSING:
        return each.default
    assert each.default_factory is not MISSING
    return each.default_factory()


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
