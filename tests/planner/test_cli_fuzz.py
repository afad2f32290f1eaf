"""Any command line of `fmlab plan` ends with a plan, or with a line that says what to put right."""

import random

import pytest

from fmlab.cli import main as fmlab

MODELS = [
    "gpt2", "gpt3-175b", "llama3.1-8b", "llama3.1-405b", "mixtral-8x7b", "bert-large-uncased",
    "t5-large", "clip-vit-l-14", "sd-1.5", "gpt2-tiny", "gpt5", "GPT2", "''", "../gpt2", "7b",
]  # fmt: skip
NUMBERS = [
    "1", "2", "3", "4", "6", "8", "12", "16", "64", "100", "1024", "0", "-1", "7.5", "1e3", "nan",
    "inf", "two", "99999999999999999999", "0x10", "''",
]  # fmt: skip
CHIPS = [
    "h100", "a100-80gb", "tpu-v5p", "trn2", "trn1", "v100-32gb", "mi300x", "b200", "H100", "h1000",
    "gpu", "cpu", "''",
]  # fmt: skip
NUMBERED = [
    "chips", "data", "tensor", "pipeline", "context", "expert", "micro-batches", "virtual-stages",
    "replicas", "zero", "global-batch", "seq-len", "bucket-mb", "network-bandwidth", "tokens",
    "goodput", "usd-per-chip-hour", "most-tensor", "keep", "host-link", "host-memory",
    "activation-budget", "batch", "prompt", "generated",
]  # fmt: skip
WORDS = {
    "schedule": "1f1b gpipe interleaved zb-h1 zbv 2f2b",
    "recompute": "none selective full budget some",
    "states": "mixed-16 mixed-18 fp32-16 pure-8 fp64",
    "precision": "bf16 fp16 fp8 fp4 tf32 fp32 fp64",
    "offload": "none optimizer parameters disk",
    "attention": "fused unfused flash",
    "logits": "chunked full",
    "activations": "fmlab megatron",
    "stage-cuts": "even weighted 3 3,6 nowhere",
    "context-method": "ring ulysses star",
    "flops-convention": "full-attention 6nd 8nd",
    "objective": "time dollars chips fame",
    "host": "p5.48xlarge trn2.48xlarge laptop",
    "calibration": "nowhere.toml /",
    "weights": "bf16 int4 int3",
    "cache": "bf16 fp8 fp2",
    "batches": "1,8 1;8 0",
    "axis-order": "data 5",
}
FLAGS = [
    "fsdp", "no-reshard", "sequence-parallel", "dropout", "split-experts", "over-time", "search",
    "why", "help", "verbose",
]  # fmt: skip


def command(rng: random.Random) -> list[str]:
    """A model, a chip and a few options, most of them sensible, some of them anything."""
    serve = rng.random() < 0.2
    found = ["serve"] if serve else []
    found.append(rng.choice(MODELS[:10] if rng.random() < 0.8 else MODELS))
    found += ["--chip", rng.choice(CHIPS[:8] if rng.random() < 0.85 else CHIPS)]
    if rng.random() < 0.8:
        usual = (("--prompt", "128"), ("--generated", "16")) if serve else (("--seq-len", "128"),)
        found += [word for pair in usual for word in pair]
    for _ in range(rng.randrange(6)):
        kind = rng.random()
        if kind < 0.6:
            found += [f"--{rng.choice(NUMBERED)}", rng.choice(NUMBERS[:9] if rng.random() < 0.7 else NUMBERS)]
        elif kind < 0.85:
            name = rng.choice(list(WORDS))
            found += [f"--{name}", rng.choice(WORDS[name].split())]
        else:
            found.append(f"--{rng.choice(FLAGS)}")
    if "--search" in found:
        found[0] = "gpt2"
    if rng.random() < 0.03:
        rng.shuffle(found)
    return ["" if word == "''" else word for word in found]


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_command_lines_end_with_a_plan_or_a_reason(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 or 1 with a plan, 2 with one line (or the parser's box); never a traceback, never an empty answer."""
    rng, ended = random.Random(seed), {0: 0, 1: 0, 2: 0}
    for _ in range(100):
        words = command(rng)
        said = f"fmlab plan {' '.join(words)}"
        try:
            status = fmlab(["plan", *words])
            parsed = True
        except SystemExit as end:  # of the parser: --help, or what it cannot read
            status, parsed = int(end.code or 0), False
        out, err = capsys.readouterr()
        assert status in ended, said
        ended[status] += 1
        assert "Traceback" not in out + err, said
        if status == 2:
            assert len(err.strip()) > 20, said
            if parsed:
                assert err.startswith("fmlab: "), said
                assert len(err.strip().splitlines()) == 1, (said, err)
        else:
            assert out.strip(), said
        if status == 1 and parsed:  # it does not fit: by how much, or nothing is near
            assert "too much" in out or "does not fit" in out or "fits" in out, (said, out)
    assert ended[0] > 5
    assert ended[2] > 20
