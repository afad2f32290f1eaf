"""Fine-tuning: what learns is what was said, LoRA starts and merges exactly, prompts learn."""

import copy
from pathlib import Path

import pytest
import torch

from fmlab.data import ByteBPE, ExampleSampler, TextPairs, arithmetic, response_examples
from fmlab.models import BERT, GPT, T5, GPTConfig, Llama, LlamaConfig, Mixtral
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.train.adapt import Trained, fine_tune, only_train
from fmlab.train.adapt_prefix import PrefixTuned
from fmlab.train.adapt_prompt import PromptTuned
from fmlab.train.generate import generate_ids
from fmlab.train.instruct import instruction_examples, packed_examples
from fmlab.train.lora import LoRA, add_lora, lora_layers, matrices, merge_lora, remove_lora, unmerge_lora
from fmlab.train.lora_files import load_lora, save_lora
from tests.models.reference import roughen, shifted, tokens

ALL = (r".*(attention|mlp)\..*",)


def gpt(dropout=0.0):
    torch.manual_seed(0)
    model = GPT(GPTConfig(101, 32, 2, 32, 2, dropout=dropout))
    roughen(model, scale=0.05)
    return model.eval()


def llama():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(101, 32, 2, 32, 4, 48, num_kv_heads=2))
    roughen(model, scale=0.05)
    return model.eval()


def moved(model, seed=1):
    """The low-rank updates of `model`, moved off 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in lora_layers(model):
            for b in layer.lora_b.values():
                b.normal_(0.0, 0.3, generator=generator)
    return model


def test_only_what_is_named_learns_and_ties_count_once():
    model = gpt()
    table = 101 * 32
    trained = only_train(model, [r"blocks\.3\.tokens\.weight"])
    assert trained == Trained(("blocks.0.tokens.weight",), table, model.num_parameters())
    assert "3,232 of" in str(trained)
    assert only_train(model).parameters == model.num_parameters()
    with pytest.raises(ValueError, match="no parameter is called 'head'"):
        only_train(model, "head")
    before = copy.deepcopy(model.state_dict())
    only_train(model, r".*\.mlp\..*")
    fine_tune(model, Rows(), CausalLM(), steps=2, lr=1e-2)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".mlp." in name}


class Rows:
    """The same four rows at every step, cut over ranks."""

    def __init__(self, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size

    def batch(self, step):
        ids = tokens(4, 9)
        labels = shifted(ids)
        labels[1, :6] = -100
        mine = slice(4 * self.rank // self.world_size, 4 * (self.rank + 1) // self.world_size)
        return {"input_ids": ids[mine], "labels": labels[mine]}


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize("targets", [LoRA().targets, ALL])
def test_lora_starts_as_the_base_and_merges_exactly(build, targets):
    model, ids = build(), tokens(2, 9)
    base = model(ids).logits
    plain = copy.deepcopy(model.state_dict())
    lora = LoRA(4, targets=targets)
    predicted = lora.parameters(model)
    trained = add_lora(model, lora)
    assert trained.parameters == predicted
    assert torch.equal(model(ids).logits, base)
    adapted = moved(model)(ids).logits
    assert (adapted - base).abs().max() > 0.01
    merge_lora(model)
    torch.testing.assert_close(model(ids).logits, adapted, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="nothing to train"):
        fine_tune(model, Rows(), CausalLM(), steps=1)
    unmerge_lora(model)
    assert torch.equal(model(ids).logits, adapted)
    double = copy.deepcopy(model).double()
    exact = double(ids).logits
    merge_lora(double)
    torch.testing.assert_close(double(ids).logits, exact, atol=1e-12, rtol=0)
    remove_lora(double)
    assert set(double.state_dict()) == set(plain)
    torch.testing.assert_close(double(ids).logits, exact, atol=1e-12, rtol=0)
    remove_lora(model)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


def test_lora_has_the_gradients_of_its_definition():
    """Those of a model whose weights are W + (alpha / r) B A, by autograd."""
    lora = LoRA(3, alpha=5, targets=ALL)
    model = gpt().double()
    add_lora(model, lora)
    moved(model)
    batch = Rows().batch(0)
    model(**batch).loss_sum.backward()
    weights = dict(model.named_parameters())
    leaves = {n: p.detach().clone().requires_grad_() for n, p in weights.items() if ".lora_" in n}
    merged = {n: p.detach() for n, p in weights.items() if ".lora_" not in n}
    for name, layer in lora_layers(model):
        rows = [torch.zeros_like(piece) for piece in layer.weight.detach().chunk(len(layer.order))]
        for i, part in enumerate(layer.order):
            if part in layer.lora_a:
                rows[i] = 5 / 3 * leaves[f"{name}.lora_b.{part}"] @ leaves[f"{name}.lora_a.{part}"]
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + torch.cat(rows)
    remove_lora(model)
    logits = torch.func.functional_call(model, merged, (batch["input_ids"],)).logits
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    ).backward()
    for name, leaf in leaves.items():
        assert (weights[name].grad - leaf.grad).norm() <= 1e-10 * leaf.grad.norm(), name


def test_lora_reaches_the_matrices_of_every_family_and_counts_as_published():
    """GPT-3's 4.7M and 37.7M trained parameters: Hu et al. 2021, table 4."""
    with torch.device("meta"):
        gpt3 = GPT.from_preset("gpt3-175b")
    assert f"{LoRA(1).parameters(gpt3) / 1e6:.1f}" == "4.7"
    assert f"{LoRA(8).parameters(gpt3) / 1e6:.1f}" == "37.7"
    ids = tokens(2, 6)
    for model in (BERT.from_preset("bert-tiny"), T5.from_preset("t5-tiny")):
        model.eval()
        names = [name for name in matrices(model) if not name.endswith(".tokens") and "attention" in name]
        add_lora(model, LoRA(2, targets=tuple(name.replace(".", r"\.") for name in names)))
        model(ids, labels=ids).loss_sum.backward()
        unused = [n for n, p in model.named_parameters() if ".lora_b." in n and not p.grad.any()]
        assert not unused


def test_lora_adapters_go_through_files(tmp_path):
    ids = tokens(2, 9)
    for build in (gpt, llama):
        for targets in (LoRA().targets, ALL):
            model = build()
            add_lora(model, LoRA(4, 12.0, targets, dropout=0.1))
            adapted = moved(model)(ids).logits
            save_lora(model, tmp_path)
            other = build()
            trained = load_lora(other, tmp_path)
            torch.testing.assert_close(other(ids).logits, adapted, atol=1e-6, rtol=0)
            assert trained == Trained.of(model)
            assert next(lora_layers(other))[1].dropout == 0.1
    with pytest.raises(ValueError, match="another model"):
        load_lora(gpt(), tmp_path)
    with pytest.raises(ValueError, match="has no adapter_config"):
        load_lora(gpt(), tmp_path / "nowhere")


def test_peft_reads_our_adapters_and_we_read_theirs(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ids = tokens(2, 9)
    for build in (gpt, llama):
        model = build()
        model.save_pretrained(tmp_path / "base")
        add_lora(model, LoRA(4))
        adapted = moved(model)(ids).logits
        save_lora(model, tmp_path / "ours")
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
        torch.testing.assert_close(theirs(ids).logits, adapted, atol=1e-5, rtol=0)
        theirs.save_pretrained(tmp_path / "theirs")
        other = build()
        load_lora(other, tmp_path / "theirs")
        torch.testing.assert_close(other(ids).logits, adapted, atol=1e-5, rtol=0)


def test_lora_refuses_what_cannot_be():
    for wrong, match in (
        (lambda: LoRA(0), "rank must be at least 1"),
        (lambda: LoRA(dropout=1.0), "dropout must be"),
        (lambda: LoRA(targets=("nothing",)).chosen(gpt()), "no matrix is called 'nothing'; there are blocks"),
        (lambda: LoRA(64).chosen(gpt()), "choose a rank of 1 to 32"),
        (lambda: LoRA(targets=(".*tokens",)).chosen(gpt()), "the output matrix"),
        (
            lambda: LoRA(1, targets=(".*router",)).chosen(Mixtral.from_preset("mixtral-tiny")),
            "cannot be adapted",
        ),
        (lambda: merge_lora(gpt()), "no low-rank updates"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
    model = gpt()
    add_lora(model)
    with pytest.raises(ValueError, match="already"):
        add_lora(model)
    dropped = gpt()
    add_lora(dropped, LoRA(dropout=0.5))
    moved(dropped).train()
    assert not torch.equal(dropped(tokens(1, 5)).logits, dropped(tokens(1, 5)).logits)


def lora_step(world, choice):
    """Gradients and weights after one step with low-rank updates, over `world` ranks."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() and world > 1 else 0
    model = gpt()
    add_lora(model, LoRA(4, targets=ALL))
    moved(model, seed=1 + rank)  # the engine must make the ranks equal
    sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    engine = parallelize(model, Layout(data=world), CausalLM(), sgd, choice)
    result = engine.step([Rows(rank, world).batch(0)])
    grads = {name: g.clone() for name, g in engine.full_grads().items()}
    weights = {name: p.clone() for name, p in engine.full_params().items()}
    engine.close()
    return result.loss, grads, weights


@pytest.mark.multirank
@pytest.mark.parametrize("choice", ["fmlab", "torch"])
def test_two_ranks_train_low_rank_updates_as_one(ranks2, choice):
    loss, grads, weights = lora_step(1, choice)
    assert all(".lora_" in name for name in grads)
    for theirs in ranks2.run(lora_step, 2, choice):
        assert theirs[0] == pytest.approx(loss, abs=1e-6)
        assert set(theirs[1]) == set(grads)
        for name, grad in grads.items():
            assert (theirs[1][name] - grad).norm() <= 1e-5 * grad.norm(), name
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[2][name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize("kind", [PromptTuned, PrefixTuned])
def test_a_prompt_starts_as_the_tokens_it_is_made_of(build, kind):
    """At the start, trained vectors or keys and values are those of tokens that stand before the text."""
    model, ids, start = build(), tokens(2, 7), [5, 17, 3]
    before = torch.tensor(start).expand(2, 3)
    with torch.no_grad():
        wanted = model(torch.cat([before, ids], 1)).logits[:, 3:]
    row = [*start, *ids[0, :4].tolist()]
    continued = generate_ids(model, [row], 100, max_new_tokens=5, greedy=True)
    base = copy.deepcopy(model.state_dict())
    tuned = kind(model, 3, start)
    torch.testing.assert_close(tuned(ids).logits, wanted, atol=1e-5, rtol=0)
    # left padding, a cache, generation
    padded = torch.cat([torch.zeros_like(ids[:, :2]), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :2] = 0
    torch.testing.assert_close(tuned(padded, attention_mask=mask).logits[:, 2:], wanted, atol=1e-5, rtol=0)
    assert tuned.config.max_positions == 29
    prompts = [ids[0, :4].tolist(), ids[1].tolist()]
    assert generate_ids(tuned, prompts, 100, max_new_tokens=5, greedy=True)[0] == continued[0]
    # only the prompt learns, and it does
    numbers = 3 * 32 if kind is PromptTuned else 2 * 2 * 3 * (32 if build is gpt else 16)
    assert Trained.of(tuned).parameters == numbers
    batch = Rows().batch(0)
    tuned(**batch).loss_sum.backward()
    assert all(p.grad.any() for p in tuned.parameters() if p.requires_grad)
    losses = fine_tune(tuned, Rows(), CausalLM(), steps=8, lr=0.1)
    assert losses[-1] < losses[0] - 0.03
    with pytest.raises(ValueError, match="packed documents"):
        tuned(ids, document_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="longer than"):
        tuned(tokens(1, 30))
    with pytest.raises(ValueError, match="already"):
        kind(model, 3)
    assert all(torch.equal(p, base[name]) for name, p in tuned.remove().state_dict().items())
    with pytest.raises(ValueError, match="positions for 1 to 31"):
        kind(model, 32)


def test_prompt_tokens_carry_no_loss_and_packed_pairs_have_the_loss_they_have_alone():
    pairs = TextPairs("x", ["say one", "say two now", "no"], ["one", "two two", "yes"], "")
    tokenizer = ByteBPE.train(arithmetic(50).documents, 280)
    examples = instruction_examples(pairs, tokenizer)
    assert examples == response_examples(pairs, tokenizer)
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size, 64, 2, 32, 2))
    roughen(model)
    for example, (first, second) in zip(examples, pairs, strict=True):
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor([example["labels"]])
        written = [i for i in example["labels"] if i != -100]
        assert tokenizer.decode(written) == f"{second}<|endoftext|>"
        prompt = len(tokenizer.encode(f"{first}\n"))
        loss = model(ids, labels=labels).loss_sum
        logits = model(ids).logits[0, prompt - 1 :]
        target = torch.tensor([*tokenizer.encode(second), tokenizer.end_of_text])
        wanted = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        assert float(loss.detach() - wanted.detach()) == pytest.approx(0, abs=1e-4)
    whole = instruction_examples(pairs, tokenizer, responses_only=False)
    assert tokenizer.decode(whole[0]["labels"]) == "ay one\none<|endoftext|>"
    alone = sum(
        float(model(torch.tensor([e["input_ids"]]), labels=torch.tensor([e["labels"]])).loss_sum.detach())
        for e in examples
    )
    rows = packed_examples(examples, 48, tokenizer.pad)
    sampler = ExampleSampler(rows, tokenizer.pad, len(rows))
    assert len(rows) < len(examples)
    batch = sampler.batch(0)
    counts = sum(sum(i != -100 for i in e["labels"]) for e in examples)
    assert int(CausalLM().counts(batch)["causal"]) == counts
    assert float(model(**batch).loss_sum.detach()) == pytest.approx(alone, abs=1e-3)


def test_the_guide_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/fine-tuning.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].split(" parameters")[0] in code
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
