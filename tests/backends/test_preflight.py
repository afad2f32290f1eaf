"""The pre-flight: planted faults are found at their line, and our own training steps have none."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmlab.backends import environment
from fmlab.backends.preflight import preflight, signatures
from fmlab.backends.preflight.limits import check_products, limits_of, tiles
from fmlab.chips import chip
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.train.optim import adamw
from fmlab.train.preflight import PreflightCommand, check, main

# ---- shapes ----------------------------------------------------------------------------------------------


def loader(examples, size, length=lambda i: 512, drop=False):
    for start in range(0, examples, size):
        rows = min(size, examples - start)
        if rows == size or not drop:
            yield {"input_ids": torch.empty(rows, length(start // size), dtype=torch.long, device="meta")}


@pytest.mark.parametrize(("examples", "full", "rest"), [(8551, 1068, 7), (1043, 130, 3)])
def test_the_last_partial_batch_is_a_second_compilation(examples, full, rest):
    counted = signatures(loader(examples, 8))
    assert counted.compilations == 2
    assert list(counted.counts.values()) == [full, 1]
    (finding,) = counted.findings()
    assert f"int64[{rest},512]" in finding.what
    assert f"at batch {full} of {full + 1}" in finding.what
    assert "drop_last" in finding.remedy
    assert signatures(loader(examples, 8, drop=True)).compilations == 1
    assert not signatures(loader(examples, 8, drop=True)).findings()


def test_each_length_is_a_compilation_until_rows_are_padded():
    lengths = [64 + i * 429 // 493 for i in range(493)]  # 429 lengths in 493 steps, as once reported
    varying = signatures(loader(493, 1, lengths.__getitem__))
    assert varying.compilations == len(set(lengths)) == 429
    assert varying.findings()[0].severity == "error"
    buckets = signatures(loader(493, 1, lambda i: (128, 256, 512)[i % 3]))
    assert buckets.compilations == 3
    assert buckets.findings()[0].severity == "warning"
    assert signatures(loader(493, 1)).compilations == 1
    with pytest.raises(ValueError, match="no batch"):
        signatures([])


# ---- faults ----------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A sound model, into which each test plants one fault."""

    def __init__(self, classes=128):
        super().__init__()
        self.body = nn.Linear(128, 128)
        self.head = nn.Linear(128, classes)

    def fault(self, hidden):
        return hidden

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.fault(self.body(x))).float(), labels)


def batch(rows=128):
    return {"x": torch.ones(rows, 128), "labels": torch.zeros(rows, dtype=torch.long)}


def report_of(fault=None, model=None, **settings):
    model = model or Classifier()
    if fault is not None:
        model.fault = fault
    return preflight(model, [batch()], **settings)


def line_of(function, text):
    """ "test_preflight.py:123" of the line with this text."""
    lines, start = inspect.getsourcelines(function)
    return f"test_preflight.py:{start + next(i for i, line in enumerate(lines) if text in line)}"


def test_a_sound_model_has_no_finding_and_is_left_as_it_was():
    model = Classifier()
    before = model.body.weight.clone()
    report = report_of(model=model)
    assert report.ok
    assert not report.findings, report
    assert torch.equal(model.body.weight, before)
    assert model.body.weight.grad is None
    assert "1 shape x 2 programs" in report.facts["compilations"]


def reads_item(hidden):
    return hidden * hidden.mean().item()


def branches(hidden):
    norm = hidden.norm()
    if norm > 1:
        hidden = hidden / norm
    return hidden


def lists(hidden):
    return hidden * len(hidden[0].tolist())


def goes_by_the_host(hidden):
    return hidden * hidden.detach().cpu().mean()


def prints(hidden):
    print(hidden.sum())
    return hidden


@pytest.mark.parametrize(
    ("fault", "text", "word"),
    [
        (reads_item, ".item()", "item()"),
        (branches, "if norm", "a branch on a tensor"),
        (lists, "tolist", "tolist()"),
        (prints, "print(", "print"),
        (goes_by_the_host, ".cpu()", "cpu()"),
    ],
)
def test_a_host_read_is_found_at_its_line(fault, text, word, capsys):
    (finding,) = report_of(fault).of("host read")
    assert finding.what.startswith(word)
    assert finding.where.endswith(line_of(fault, text)) or line_of(fault, text) in finding.where
    assert finding.times == 1


def test_clipping_by_tensor_operators_reads_nothing():
    def clipped(hidden):
        return hidden * torch.clamp(1 / hidden.norm(), max=1)

    assert report_of(clipped).ok
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rows):
        model(**rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert not preflight(model, [batch()], step=step).of("host read")


def test_masked_selection_has_no_fixed_shape():
    (finding,) = report_of(lambda hidden: hidden + hidden[hidden > 0].sum()).of("data-dependent shape")
    assert finding.severity == "error"
    on_tpu = report_of(lambda hidden: hidden + hidden[hidden > 0].sum(), chip="tpu-v5e")
    assert on_tpu.of("data-dependent shape")[0].severity == "warning"


def test_dtypes_that_the_chip_lacks_or_that_lose_digits():
    def doubles(hidden):
        return (hidden * torch.ones(1, dtype=torch.float64)).float()

    found = report_of(doubles, precision="fp32").of("dtype")
    assert found[0].severity == "error"
    assert "no float64" in found[0].what
    assert report_of(doubles, precision="fp32", chip="tpu-v4").of("dtype")[0].severity == "warning"

    class Narrow(Classifier):
        def forward(self, x, labels):
            return F.cross_entropy(self.head(self.body(x)).bfloat16(), labels)

    (finding,) = report_of(model=Narrow(2000), precision="fp32").of("dtype")
    assert "2,000 classes in bfloat16" in finding.what
    assert not report_of(model=Narrow(200), precision="fp32").of("dtype"), "bf16 tells 200 classes apart"
    rows = {**batch(), "labels": torch.arange(128) + 2**40}
    big = preflight(Classifier(), [rows], lambda model, b: model(b["x"], b["labels"].clamp(max=3)))
    assert "1,099,511,627,903" in big.of("dtype")[0].what


def test_masks_that_become_minus_infinity_or_nan():
    lowest = torch.finfo(torch.float32).min

    def cast(hidden):  # the usual additive mask, made in float32
        mask = torch.full_like(hidden, lowest).triu(1)
        return (hidden.bfloat16() + mask.bfloat16()).softmax(1).to(hidden.dtype)

    (finding,) = report_of(cast, precision="fp32").of("mask")
    assert finding.severity == "warning"
    assert "infinite in bf16" in finding.what

    def empty_row(hidden):
        return hidden.masked_fill(torch.ones(128, 1, dtype=torch.bool), float("-inf")).softmax(1)

    severities = {f.severity: f.what for f in report_of(empty_row).of("mask")}
    assert "NaN" in severities["error"]


def test_a_python_number_that_changes_makes_each_step_another_program():
    class Counting(Classifier):
        steps = 0

        def fault(self, hidden):
            self.steps += 1
            return hidden * (1 + self.steps / 100)

    (finding,) = report_of(model=Counting()).of("changing program")
    assert line_of(Counting.fault, "return hidden *") in finding.where
    assert "1.02" in finding.what
    assert "1.03" in finding.what


def test_ties_and_optimizers_that_a_move_breaks():
    model = Classifier()
    model.head = nn.Linear(128, 128)
    model.head.weight = model.body.weight
    assert "body.weight and head.weight" in report_of(model=model).of("ties")[0].what
    other = torch.optim.SGD(Classifier().parameters(), lr=0.1)
    assert "4 tensors that are not the model's" in report_of(optimizer=other).of("optimizer")[0].what


def test_cores_memory_and_tiles():
    (finding,) = report_of(chip="trn1", cores=6).of("cores")
    assert "1, 2, 8, 32" in finding.what
    for cores in (1, 2, 8, 32, 64):
        assert not report_of(chip="trn1", cores=cores).of("cores")
    with torch.device("meta"):
        large = nn.ParameterList([torch.empty(1024, 1024, 300) for _ in range(4)])  # 1.3e9 weights
    step = preflight(large, [{"x": torch.ones(1)}], step=lambda b: None, chip="trn1")
    assert "take 18.8 GiB and a device has 16.0 GiB" in step.of("memory")[0].what, "a core has half of trn1"
    assert not preflight(large, [{"x": torch.ones(1)}], step=lambda b: None, chip="trn2").of("memory")
    narrow = nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 64))
    report = preflight(narrow, [torch.ones(128, 64)], lambda model, x: model(x).sum(), chip="trn1")
    assert "padding" in report.of("tiles")[0].what
    with pytest.raises(ValueError, match="no pre-flight for h100"):
        report_of(chip="h100")
    with pytest.raises(ValueError, match="trn1 has 1"):
        report_of(chip="trn1", logical_core=2)


def test_a_step_beyond_the_compilers_instructions_is_refused_early():
    limits = limits_of(chip("trn2"))
    product = (1, 2**17, 2048, 8192)  # rows, inner, columns, in tiles of 128 x 128 by 512
    findings, instructions, useful = check_products(limits, [(product, 3)])
    assert (findings, instructions, useful) == ([], 3 * 1024 * 16 * 16, 1.0)
    (finding,), instructions, _ = check_products(limits, [(product, 20)])
    assert finding.severity == "error"
    assert f"{instructions:,}" in finding.what
    assert "over the compiler's 5,000,000" in finding.what
    assert not check_products(limits_of(chip("tpu-v5e")), [(product, 20)])[0]
    assert tiles(limits, (1, 128, 129, 512)) == (2, 129 / 256)


def test_a_variable_set_too_late_is_a_finding(monkeypatch):
    monkeypatch.setitem(environment._seen, "torch_neuronx", {})
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    (finding,) = report_of().of("environment")
    assert "NEURON_RT_VISIBLE_CORES was changed after torch_neuronx" in finding.what


def test_a_model_without_a_loss_says_what_to_pass():
    with pytest.raises(ValueError, match="pass loss="):
        preflight(nn.Linear(2, 2), [torch.ones(1, 2)])


# ---- our own steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny"])
def test_our_models_have_nothing_to_put_right(name):
    report = check(PreflightCommand(name, chip="tpu-v5e", seq_len=64))
    assert report.ok, report


def test_our_training_step_reads_counts_before_and_results_after():
    model = GPT.from_preset("gpt2-tiny")
    engine = parallelize(model, Layout(precision="bf16"), CausalLM(), adamw(), max_grad_norm=1.0)
    rows = {"input_ids": torch.randint(0, 4096, (2, 32))}
    report = preflight(model, [rows], step=lambda b: engine.step([b]), chip="tpu-v5e")
    reads = report.of("host read")
    # Counts come from labels that are on the host; the loss and norm are read when all is done.
    assert {finding.where.split(":")[0] for finding in reads} == {"fmlab/parallel/engine.py"}, report
    assert sum(finding.times for finding in reads) <= 3
    assert {finding.severity for finding in report.findings if finding not in reads} <= {"note"}


def test_the_command_ends_with_one_where_something_is_to_be_put_right(capsys):
    assert main(["gpt2-tiny", "--chip", "trn1", "--seq-len", "32"]) == 0
    assert main(["gpt2-tiny", "--chip", "trn1", "--seq-len", "32", "--examples", "17"]) == 1
    assert "the last batch is smaller" in capsys.readouterr().out
    with pytest.raises(ValueError, match="must give"):
        main(["fmlab.backends:available_backends"])
