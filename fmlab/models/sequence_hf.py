"""Files of the recurrent and the convolutional language model: tensors named as torch.nn names them.

No library has a config.json for these, so "model_type" is ours; the weights load into a plain module with
`tokens` (nn.Embedding), `layers` (nn.LSTM or its like; nn.Conv1d, nn.Linear and nn.LayerNorm) and `head`.
"""

from dataclasses import asdict, fields
from typing import Any

from fmlab.models.convolutional import CausalConvConfig
from fmlab.models.hf import HFFormat, Weight
from fmlab.models.recurrent import RecurrentConfig


def recurrent_weights(config: RecurrentConfig) -> list[Weight]:
    """Our names beside those of torch.nn."""
    pairs = [Weight("blocks.0.tokens.weight", "tokens.weight")]
    for i in range(config.num_layers):
        for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            pairs.append(Weight(f"blocks.{i + 1}.cell.{leaf}", f"layers.{leaf}_l{i}"))
    if not config.tie_embeddings:
        pairs.append(Weight(f"blocks.{config.num_layers + 1}.tokens.weight", "head.weight"))
    return pairs


def convolutional_weights(config: CausalConvConfig) -> list[Weight]:
    """Our names beside those of torch.nn."""
    pairs = [Weight("blocks.0.tokens.weight", "tokens.weight")]
    for i in range(config.num_layers):
        for module in ("norm", "conv", "output"):
            for leaf in ("weight", "bias"):
                pairs.append(Weight(f"blocks.{i + 1}.{module}.{leaf}", f"layers.{i}.{module}.{leaf}"))
    last = config.num_layers + 1
    pairs += [Weight(f"blocks.{last}.norm.{leaf}", f"norm.{leaf}") for leaf in ("weight", "bias")]
    if not config.tie_embeddings:
        pairs.append(Weight(f"blocks.{last}.tokens.weight", "head.weight"))
    return pairs


def _format(config_class: type, model_type: str, weights: Any) -> HFFormat:
    def from_fields(found: dict[str, Any]) -> Any:
        names = {field.name for field in fields(config_class)}
        unknown = sorted(set(found) - names - {"model_type"})
        if unknown:
            raise ValueError(f"config.json has unknown fields: {', '.join(unknown)}; legal: {sorted(names)}")
        return config_class(**{name: value for name, value in found.items() if name in names})

    def to_fields(config: Any) -> dict[str, Any]:
        return {"model_type": model_type, **asdict(config)}

    return HFFormat("model_type", model_type, weights, to_fields, from_fields)


RECURRENT = _format(RecurrentConfig, "fmlab-recurrent", recurrent_weights)
CONVOLUTIONAL = _format(CausalConvConfig, "fmlab-causal-conv", convolutional_weights)
