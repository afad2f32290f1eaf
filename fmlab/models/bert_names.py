"""How the encoders of the BERT family are named in Hugging Face's files; each family fills in one `Names`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmlab.models.hf import Weight

if TYPE_CHECKING:
    from fmlab.models.bert_config import BERTConfig

_KINDS = {"gamma": "weight", "beta": "bias"}  # of norms in checkpoints that come from TensorFlow

Theirs = str | tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """The names of a family, without ".weight" and ".bias".

    Args:
        prefix: of the encoder's names in a model with heads ("bert."); a bare encoder's files have none.
        classes: `heads` -> transformers' class.
        embedding: parts of our embedding block -> theirs; those that end in "norm" have a bias.
        layer: parts of our layer block -> theirs, after `layers` with the number of the layer.
        heads: `heads` -> for each head block in order, its parts -> theirs (with the prefix).
        bias: the whole name of the output bias of masked-token prediction.
        tied: whole names of copies of the token table; aliases: whole names of copies of others.
    """

    prefix: str
    classes: Mapping[str, str]
    embedding: Mapping[str, str]
    layers: str
    layer: Mapping[str, str | tuple[str, ...]]
    heads: Mapping[str, tuple[Mapping[str, str], ...]]
    bias: str
    tied: str
    aliases: Mapping[str, str]

    def weights(self, config: "BERTConfig") -> list[Weight]:
        """Our names beside theirs."""
        pairs: list[tuple[str, Theirs]] = []
        for part, theirs in self.embedding.items():
            kinds = ("weight", "bias") if part == "norm" else ("weight",)
            pairs += [(f"blocks.0.{part}.{kind}", f"{self.prefix}{theirs}.{kind}") for kind in kinds]
        for i in range(config.num_layers):
            start = f"{self.prefix}{self.layers.format(i)}"
            for part, several in self.layer.items():
                for kind in ("weight", "bias"):
                    parts = (several,) if isinstance(several, str) else several
                    full = tuple(f"{start}.{name}.{kind}" for name in parts)
                    pairs.append((f"blocks.{i + 1}.{part}.{kind}", full if len(full) > 1 else full[0]))
        for index, block in enumerate(self.heads[config.heads], config.num_layers + 1):
            pairs += [
                (f"blocks.{index}.{part}.{kind}", f"{theirs}.{kind}")
                for part, theirs in block.items()
                for kind in ("weight", "bias")
            ]
        if "labels" in config.learns_from:
            last = config.num_layers + len(self.heads[config.heads])
            pairs.append((f"blocks.{last}.tokens.bias", self.bias))
        return [Weight(ours, self._bare(config, theirs)) for ours, theirs in pairs]

    def rename(self, config: "BERTConfig", name: str) -> str:
        """The name that `weights` uses, whatever the prefix, the names of norms, and which copy is kept."""
        start, _, kind = name.rpartition(".")
        name = f"{start}.{_KINDS.get(kind, kind)}"
        name = self.aliases.get(name, name)
        roots = (*{theirs.split(".")[0] for theirs in self.embedding.values()}, self.layers.split(".")[0])
        if name.startswith((*(f"{root}." for root in roots), "pooler.")):
            name = self.prefix + name
        bare = self._bare(config, name)
        assert isinstance(bare, str)
        return bare

    def ignore(self, config: "BERTConfig", name: str) -> bool:
        """Old buffers, copies of the token table, and heads of other classes than the one that is loaded."""
        if name.endswith(".position_ids") or name == self.tied:
            return True
        wanted = {part for block in self.heads[config.heads] for part in block.values()}
        known = {part for blocks in self.heads.values() for block in blocks for part in block.values()}
        bare = {self._bare(config, part) for part in known - wanted}
        unwanted_bias = name == self.bias and "labels" not in config.learns_from
        return unwanted_bias or name.rpartition(".")[0] in bare

    def heads_of(self, fields: Mapping[str, Any], default: str) -> str:
        """The `heads` of the class that config.json names. Raises ValueError for a class that we lack."""
        named = fields.get("architectures") or [self.classes[default]]
        able = [heads for heads, name in self.classes.items() if name == named[0]]
        if not able:
            legal = ", ".join(sorted(set(self.classes.values())))
            raise ValueError(f"config.json is for {named[0]}; supported are {legal}")
        without_pooler = "encoder" in able and fields.get("has_pooler", True) is False
        return "encoder" if without_pooler else able[-1]

    def _bare(self, config: "BERTConfig", theirs: Theirs) -> Theirs:
        if config.heads not in ("encoder", "pooled"):
            return theirs
        if isinstance(theirs, str):
            return theirs.removeprefix(self.prefix)
        return tuple(name.removeprefix(self.prefix) for name in theirs)


def class_fields(config: "BERTConfig") -> dict[str, Any]:
    """The fields of config.json that say how many classes there are, and what they are called."""
    given = config.class_names or [f"LABEL_{i}" for i in range(config.num_classes)]
    names = dict(enumerate(given))
    return {"id2label": names, "label2id": {name: i for i, name in names.items()}}


def classes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of our config that say how many classes config.json has, and their names if it gives any.

    Raises ValueError for regression and several labels.
    """
    count, named = num_classes(fields), fields.get("id2label") or {}
    names = tuple(str(named.get(str(i), named.get(i, ""))) for i in range(count))
    usual = all(name in ("", f"LABEL_{i}") for i, name in enumerate(names))
    return {"num_classes": count, "class_names": None if usual else names}


def num_classes(fields: Mapping[str, Any]) -> int:
    """How many classes config.json says there are. Raises ValueError for regression and several labels."""
    if (problem := fields.get("problem_type")) not in (None, "single_label_classification"):
        raise ValueError(f"config.json sets problem_type={problem!r}; only one class a row is supported")
    return len(fields["id2label"]) if fields.get("id2label") else int(fields.get("num_labels", 2))


def one_dropout(fields: Mapping[str, Any], *names: str) -> float:
    """The dropout that all of these fields name. Raises ValueError when they differ."""
    values = {fields.get(name, 0.1) for name in names}
    if len(values) > 1:
        raise ValueError(
            f"config.json has different dropouts {sorted(values)} ({', '.join(names)}); only one value is "
            "supported"
        )
    return float(values.pop())
