"""Command lines and config files, most of them nearly right, some of them anything; drawn at random."""

import json
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fmlab.parallel import Layout
from fmlab.train import TrainConfig
from fmlab.train.images.config import ImageConfig

#: whole numbers that are small enough to run, and what is no number, or none that can be
SMALL = ["1", "2", "3", "4", "0", "-1"]
ODD = [
    *("7.5", "1e3", "nan", "inf", "-inf", "two", "0x10", "", " ", "1_0", "9" * 20, "9" * 400, "٣", "None"),
    *("True", "[]", "{}", "\x00", "-", "--", "../..", "é" * 300, "1,2", "~", "/dev/null", "/proc/self/mem"),
]
MODELS = [
    *("gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "roberta-tiny", "mixtral-tiny", "vae-nano"),
    "sd-tiny",
    *("gpt5", "GPT2-TINY", "clip-tiny", "unet-tiny", "json:loads", "nowhere:f", "math:pi", ":", "a:b:c"),
]
WORDS: dict[str, list[str]] = {
    "model": MODELS,
    "objective": ["causal", "prefix", "experts", "masked", "classes", "span", "sentence-order", "fame"],
    "optimizer": ["adamw", "lamb", "sgd"],
    "engine": ["fmlab", "torch", "deepspeed", "megatron"],
    "backend": ["cpu", "auto", "cuda", "tpu", "neuron", "sim:h100", "sim:", "sim:h1000", "xla"],
    "numbers": ["bf16-kahan", "fp16-scaled", "fp8-delayed", "fp4"],
    "on_bad_step": ["skip", "stop", "rollback", "pray"],
    "precision": ["fp32", "bf16", "fp64", "fp16"],
    "schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "2f2b"],
    "recompute": ["none", "selective", "full", "budget", "some"],
    "offload": ["none", "optimizer", "parameters", "disk"],
    "stage_cuts": ["even", "weighted", "1", "3,6", "x"],
    "context_method": ["ring", "ulysses"],
    "context_balance": ["none", "striped", "mirrored"],
    "collectives": ["torch", "fmlab", "nccl"],
    "prediction": ["epsilon", "v", "x0", "y"],
    "host": ["p5.48xlarge", "trn2.48xlarge", "laptop"],
    "chip": ["h100", "trn2", "tpu-v5e", "h1000", "cpu"],
    "form": ["torchrun", "deepspeed", "slurm", "kubernetes", "pbs"],
    "image": ["registry/me:1", "a b", "-x", "$(id)"],
    "ip": ["127.0.0.1", "::1", "localhost", "0.0.0.0", "", "nowhere.invalid", "127.0.0.1; id", "256.1.1.1"],
    "port": ["0", "-1", "65536", "70000", "80x", "8899"],
    "only": ["0.1", "1.1", "9.9", "x", "", "1"],
}
_FLAGS = {f.name for kind in (ImageConfig, Layout) for f in fields(kind) if isinstance(f.default, bool)}


class Place:
    """A folder with what command lines name: texts, runs, and files and folders that are of no use."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.text, self.tokenizer, self.run = folder / "text.txt", folder / "tokenizer", folder / "run"
        self.text.write_text("".join(f"item {i} comes before item {i + 1}.\n" for i in range(400)))
        (folder / "empty.txt").touch()
        (folder / "noise").write_bytes(bytes(range(256)) * 8)
        (folder / "noise.json").write_bytes(b'{"a": \xff\xfe')
        (folder / "noise.toml").write_bytes(b"a = [" * 3000)
        (folder / "deep.json").write_text("[" * 100_000)
        (folder / "folder.toml").mkdir()
        (folder / "loop").symlink_to("loop")
        (folder / "nothing").mkdir()

    def paths(self) -> list[str]:
        names = sorted(path.name for path in self.folder.iterdir())
        return [str(self.folder / name) for name in names] + ["/proc/version", "", "~nobody/x", "x" * 300]


def value(draw: random.Random, name: str, place: Place) -> str:
    """A value for the option of that name, as it stands on a command line."""
    if draw.random() < 0.12:
        return draw.choice(ODD)
    if name in WORDS:
        return draw.choice(WORDS[name])
    if name in ("corpus", "init", "teacher", "tokenizer", "out", "autoencoder", "folder", "html"):
        return draw.choice(place.paths())
    if name in ("lr", "clip", "weight_decay", "beta1", "validation", "spike_factor", "ema", "bucket_mb"):
        return draw.choice(["0", "1e-3", "0.5", "1", "-1", "1e400", "nan", "6"])
    return draw.choice(SMALL)


def options(draw: random.Random, kind: type, most: int, place: Place) -> list[str]:
    """Some of the options that a dataclass has on a command line."""
    names = [each.name for each in fields(kind) if each.name not in ("layout", "model", "resume")]
    found = []
    for name in draw.sample(names, draw.randrange(most + 1)):
        dashed = name.replace("_", "-")
        if name in _FLAGS and draw.random() < 0.9:
            found.append(f"--{draw.choice(['', 'no-'])}{dashed}")
        else:
            found += [f"--{dashed}", value(draw, name, place)]
    return found


def train(draw: random.Random, place: Place) -> list[str]:
    """`fmlab train`: a small run and a few options; or a config file; or a run to resume."""
    small = {"steps": "2", "batch-size": "2", "seq-len": "16", "eval-every": "0", "log-every": "0"}
    usual = {**small, "corpus": str(place.text), "tokenizer": str(place.tokenizer), "backend": "cpu"}
    words = [draw.choice(MODELS[:2] if draw.random() < 0.6 else MODELS)]
    image = words[0] in ("vae-nano", "sd-tiny")
    if image or (words[0] not in MODELS[:2] and draw.random() < 0.8):
        del usual["tokenizer"]  # each family has a kind of its own
    if image:
        usual = {name: said for name, said in usual.items() if name not in ("seq-len", "corpus")}
    words += [word for name, said in usual.items() if draw.random() < 0.97 for word in (f"--{name}", said)]
    words += options(draw, ImageConfig if image else TrainConfig, 2, place)
    words += options(draw, Layout, 2, place) if draw.random() < 0.3 else []
    kind = draw.random()
    if kind < 0.3:
        words += ["--config", str(config_file(draw, place))]
    elif kind < 0.6:
        words += ["--out", str(place.folder / "resumed"), "--resume"]
    return words


def config_file(draw: random.Random, place: Place) -> Path:
    """A file of settings, nearly right; sometimes damaged, of another kind, or none at all."""
    if draw.random() < 0.15:
        return Path(draw.choice(place.paths()))
    settings: dict[str, Any] = {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_every": 0, "log_every": 0}
    settings |= {"corpus": str(place.text), "tokenizer": str(place.tokenizer)}
    names = [each.name for each in fields(TrainConfig) if each.name != "steps"]
    for name in draw.sample(names, draw.randrange(4)):
        settings[name] = _plain(draw, value(draw, name, place))
    some = [each.name for each in draw.sample(fields(Layout), 2)]
    layout = {name: _plain(draw, value(draw, name, place)) for name in some}
    settings |= {"layout": draw.choice([layout, layout, 3, [], "data"])} if draw.random() < 0.4 else {}
    if draw.random() < 0.1:
        settings[draw.choice(["stepz", "", "Steps", "layout.data"])] = 1
    ending = draw.choice([".json", ".toml", ".toml", ".JSON", ".yaml"])
    text = json.dumps(settings) if ending.lower() == ".json" else _toml(settings)
    data = bytearray(text.encode())
    if draw.random() < 0.2:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if draw.random() < 0.1:
        del data[draw.randrange(len(data)) :]
    path = place.folder / f"config{ending}"
    path.write_bytes(data)
    return path


def _plain(draw: random.Random, word: str) -> Any:
    """A value of a file: the number that a word says, the word, or something else altogether."""
    if draw.random() < 0.1:
        return draw.choice([None, True, [], {}, [1], {"a": 1}, 10**400, -(2**63), 1e308, "", 1.5, [[]] * 3])
    try:
        return json.loads(word)
    except ValueError:
        return word


def _toml(settings: dict[str, Any]) -> str:
    layout = settings.pop("layout", {})
    lines = [f"{json.dumps(name)} = {json.dumps(said)}" for name, said in settings.items()]
    if not isinstance(layout, dict):
        return "\n".join([*lines, f"layout = {json.dumps(layout)}", ""])
    table = [f"{name} = {json.dumps(said)}" for name, said in layout.items()]
    return "\n".join([*lines, "[layout]", *table, ""])


def parity(draw: random.Random, place: Place) -> list[str]:
    words = options(draw, Layout, 4, place)
    for name in ("model", "engine", "objective", "steps", "seed", "html", "backend", "batches"):
        if draw.random() < 0.3:
            words += [f"--{name}", value(draw, "model" if name in ("batches", "objective") else name, place)]
    return words


def data(draw: random.Random, place: Place) -> list[str]:
    corpus = draw.choice([*place.paths(), "shapes", "digits", "nothing", "hub:", "hub:a", "hub:a/b/c"])
    size = draw.choice([*SMALL, *ODD, "256", "257", "300", "600"])
    return draw.choice(
        [
            ["list"],
            ["card", draw.choice(["python-docs", "shapes", corpus])],
            ["stats", corpus, "--vocab-size", size],
            ["tokenizer", draw.choice(place.paths()), "--corpus", corpus, "--vocab-size", size],
            [draw.choice(ODD)],
        ]
    )


def export(draw: random.Random, place: Place) -> list[str]:
    ledger = place.folder / "copies" / ".fmlab-export.json"
    if ledger.exists() and draw.random() < 0.5:
        texts = ["[1]", "null", "{", "3", '"x"', '{"a": 1}', '{"a": "\\ud800"}', "[" * 9999]
        ledger.write_text(draw.choice(texts))
    words = [draw.choice([str(place.folder / "copies"), *place.paths()])]
    words += ["--only", *(value(draw, "only", place) for _ in range(draw.randrange(1, 3)))]
    return words + draw.sample(["--solutions", "--no-outputs", "--force", "--farce"], draw.randrange(3))


def new(draw: random.Random, place: Place) -> list[str]:
    words = [draw.choice(["mine", "my-model", "a b", "..", "/x", "json", "class", "1st", "torch", *ODD])]
    for name in ("folder", "chip", "chips", "host", "form", "image"):
        if draw.random() < (0.8 if name == "folder" else 0.3):
            words += [f"--{name}", value(draw, name, place)]
    return words


def lab(draw: random.Random, place: Place) -> list[str]:
    words = [draw.choice(place.paths())] if draw.random() < 0.6 else [str(place.folder / "nothing")]
    for name in ("port", "ip"):
        if draw.random() < 0.5:
            words += [f"--{name}", value(draw, name, place)]
    return words + draw.sample(["--no-browser", "--verbose", "--loud"], draw.randrange(2))


def checkpoints(draw: random.Random, place: Place) -> list[str]:
    return draw.choice([[], *([path] for path in place.paths()), [str(place.run)], ["--all"]])


#: command -> (what draws its options, how often)
COMMANDS: dict[str, tuple[Callable[[random.Random, Place], list[str]], int]] = {
    "train": (train, 10),
    "parity": (parity, 3),
    "data": (data, 2),
    "export": (export, 2),
    "new": (new, 2),
    "lab": (lab, 2),
    "checkpoints": (checkpoints, 1),
}
