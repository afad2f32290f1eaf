"""Plan the training on any chips: python -m my_model.plan full --chip h100 --chips 64 --global-batch 512 ...

All settings are those of `fmlab plan --help`, --search and --emit among them.
"""

import sys
from collections.abc import Mapping

from fmlab.cli import guarded
from fmlab.planner import ModelShape, OwnModels, gpt_shape
from fmlab.planner.cli import main

from .model import MODELS, SIZES, Config


def shape(name: str, config: Config) -> ModelShape:
    """What a plan knows of the model. It is refused as long as its parameters are not those of the model.

    Other models: llama_shape, bert_shape and t5_shape of fmlab.planner, or a ModelShape of parts.
    """
    return gpt_shape(
        name=name,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        vocab=config.vocab_size,
        positions=config.max_positions,
    )


SHAPES: Mapping[str, ModelShape] = {name: shape(name, config) for name, config in SIZES.items()}
OWN = OwnModels("my_model.train", MODELS, SHAPES)

if __name__ == "__main__":
    sys.exit(guarded("plan", lambda: main(sys.argv[1:], OWN)))
