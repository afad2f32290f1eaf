# %% [markdown]
# **You will learn** why a chip that reads a page at once writes word by word, and what servers do about it.

# %% tags=["setup"]
import json
import time
import urllib.error
import urllib.request

import torch
from fmlab import meter
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.models import GPT, Llama
from fmlab.models.attention.cost import kv_cache_bytes
from fmlab.train import TrainConfig, generate, train
from fmlab.train.serve import Batcher, Request, Server
from fmlab.train.serve.load import run_load


# %% tags=["setup"]
def fresh(**overrides) -> GPT:
    """A GPT of 15 million random weights: 59 MB, more than a processor keeps close by."""
    torch.manual_seed(0)
    shape = dict(vocab_size=4096, max_positions=512, num_layers=4, hidden_size=512, num_heads=8)
    return GPT.from_preset("gpt2-tiny", **{**shape, **overrides}).eval()


# %% [markdown]
# ## 1 · Two phases
# Reading the prompt is the **prefill**: all tokens in one call. Writing is the **decode**: one call a token. Both read every
# weight of the model once a call.

# %%
guess_flops = predict(
    "Prefill of 128 tokens against writing one: how many times more FLOPs?", unit="x"
)
guess_flops

# %%
model = fresh()
prompt = torch.randint(4096, (1, 128))
cache = model.new_cache(batch=1, max_length=256)
with torch.no_grad(), meter.flops() as read:
    model(prompt, cache=cache)
with torch.no_grad(), meter.flops() as wrote:
    model(prompt[:, :1], cache=cache)

# %%
ratio = read.total / wrote.total
compare("prefill / decode", yours=guess_flops, formula=128, measured=ratio, unit="x", digits=3)

# %% [markdown]
# The same weights are read for 128 times the work. So how long does each take?


# %%
@torch.no_grad()
def seconds(model: GPT, batch: int, length: int, past: int = 0) -> float:
    """Best time of one call on [batch, length] new tokens after `past` old ones."""
    cache = model.new_cache(batch, past + length)
    if past:
        model(torch.zeros(batch, past, dtype=torch.long), cache=cache)
    times = []
    for _ in range(5):
        cache.crop(past)
        start = time.perf_counter()
        model(torch.zeros(batch, length, dtype=torch.long), cache=cache)
        times.append(time.perf_counter() - start)
    return min(times)


# %% tags=["timing"]
prefill, decode = seconds(model, 1, 128), seconds(model, 1, 1, past=128)
compare(
    Row("prefill", measured=1e6 * prefill / 128, unit="µs/token", noisy=True),
    Row("decode", measured=1e6 * decode, unit="µs/token", noisy=True),
    Row("slower", measured=decode / (prefill / 128), unit="x", noisy=True, digits=2),
)

# %% [markdown]
# ## 2 · The roofline
# A call takes at least as long as its arithmetic, and at least as long as reading its weights. The larger of the two is
# the limit. [[1.9]] draws it for real chips.

# %%
show_source(meter.Machine)

# %% tags=["timing"]
machine = meter.measure_machine()
compare(
    Row("matrix products", measured=machine.flops / 1e9, unit="GFLOP/s", noisy=True),
    Row("memory", measured=machine.bandwidth / 1e9, unit="GB/s", noisy=True),
    Row("balance", measured=machine.balance, unit="FLOP/B", noisy=True),
)

# %% [markdown]
# With n tokens in a call, each 4-byte weight does 2n operations: **n/2 FLOPs a byte**. Below the balance of the machine,
# memory decides, and more tokens in a call are free.

# %% tags=["timing"]
weights = model.num_parameters(positions=False)
tokens = [1, 2, 4, 8, 16, 32, 64, 128, 256]
bound = [1e3 * machine.seconds(2 * weights * n, 4 * weights) for n in tokens]
batched = [1e3 * seconds(model, n, 1, past=32) for n in tokens[:6]]
whole = [1e3 * seconds(model, 1, n) for n in tokens]

# %%
fig, ax = figure(x="new tokens in a call [tokens]", y="time [ms]")
ax.plot(tokens, bound, linestyle="--", color="gray", label="roofline")
ax.plot(tokens, whole, marker="o", label="prefill of one text")
ax.plot(tokens[:6], batched, marker="s", label="decode of many texts")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.legend()
text = "A call of eight tokens takes far less than eight calls; the line is a bound, not a forecast."
caption(fig, kind="measured", text=text, noisy=True)

# %% tags=["timing"]
compare(
    Row(
        "8 texts in one call, by the roofline",
        formula=bound[3] / bound[0],
        unit="x one",
        digits=2,
    ),
    Row(
        "8 texts in one call",
        measured=batched[3] / batched[0],
        unit="x one",
        noisy=True,
        digits=2,
    ),
)

# %% [markdown]
# Decoding one text leaves the arithmetic idle. **Decoding many texts together** reads the weights once for all: that is what
# a server must do.

# %% [markdown]
# ## 3 · What limits the batch
# Each text needs its keys and values at every step ([[#1.2]], section 4): 2 · layers · key/value heads · head width
# numbers a token.

# %%
guess_cache = predict(
    "GPT-3 175B, one text of 2,048 tokens, 2 bytes a number: how large is its cache?", unit="GB"
)
guess_cache

# %%
with torch.device("meta"):
    gpt3 = GPT.from_preset("gpt3-175b")
    measured = gpt3.to(torch.bfloat16).new_cache(batch=1, max_length=2048).nbytes
formula = kv_cache_bytes(2048, layers=96, kv_heads=96, head_size=128)
compare("cache", yours=guess_cache, formula=formula / 1e9, measured=measured / 1e9, unit="GB")

# %%
shapes = {"gpt2": GPT, "gpt3-175b": GPT, "llama2-7b": Llama, "llama3.1-8b": Llama}
per_token = []
for name, family in shapes.items():
    with torch.device("meta"):
        one = family.from_preset(name).to(torch.bfloat16).new_cache(batch=1, max_length=1)
    per_token.append(one.nbytes)
fit = [40 * 10**9 // (2048 * n) for n in per_token]
columns = {"bytes a token": per_token, "texts of 2,048 tokens in 40 GB": fit}
Table(
    {"model": shapes, **columns},
    kinds=dict(zip(columns, ("measured", "modelled"), strict=True)),
)

# %% [markdown]
# Llama 3.1 shares each key/value head among four query heads: four times as many texts fit as with Llama 2's.

# %% [markdown]
# ## 4 · Pages
# A static cache reserves the longest text for everyone. A **paged** cache hands out pages of a few tokens as texts grow, and
# wastes less than a page each.

# %%
small = fresh(hidden_size=64, num_heads=4, num_layers=2, vocab_size=64)
lengths = [12, 200, 35, 90, 7, 150, 60, 18]
requests = [Request(tuple(range(1, 6)), n - 5, greedy=True, seed=n) for n in lengths]
batcher = Batcher(small, pages=100, page_size=16, max_batch=8)
most = 0
for request in requests:
    batcher.submit(request)
while not batcher.idle:
    batcher.step()
    most = max(most, batcher.pool.pages - batcher.pool.free)

# %%
page = batcher.pool.bytes_per_page
static = kv_cache_bytes(max(lengths), 2, 4, 16, itemsize=4) * len(lengths)
compare(
    Row("static: 8 rows of the longest", formula=static / 1e6, measured=small.new_cache(8, 200).nbytes / 1e6, unit="MB"),
    Row("pages in use, at most", measured=most * page / 1e6, unit="MB"),
    Row("pages left behind", formula=0, measured=batcher.pool.pages - batcher.pool.free, unit="pages"),
)  # fmt: skip

# %% [markdown]
# ## 5 · Continuous batching
# A static batch ends when its longest text ends; meanwhile finished rows compute nothing. Letting texts in and out **between
# steps** fills the gaps.

# %%
show_source(Batcher, region="step")

# %%
guess_calls = predict(
    "12 texts, every fourth of 40 tokens, the rest of 5; batches of 4. "
    "How many calls of the model does a static batch need?",
    unit="calls",
)
guess_calls


# %%
def run(continuous: bool) -> tuple[Batcher, list[tuple[int, int]]]:
    """All texts through one batcher; which text ran in which step."""
    batcher = Batcher(small, pages=100, page_size=16, max_batch=4, continuous=continuous)
    for i in range(12):
        batcher.submit(Request((5, 6, 7), 40 if i % 4 == 0 else 5, greedy=True))
    seen, step = [], 0
    while not batcher.idle:
        seen += [(step, event.request_id) for event in batcher.step()]
        step += 1
    return batcher, seen


runs = {name: run(name == "continuous") for name in ("static", "continuous")}
calls = {name: b.counts.prefills + b.counts.decodes for name, (b, _) in runs.items()}

# %%
compare(
    Row("static", yours=guess_calls, formula=3 * 40, measured=calls["static"], unit="calls"),
    Row("continuous", measured=calls["continuous"], unit="calls"),
)

# %%
titles = ["static", "continuous"]
fig, axes = figure(x="step [number]", y="text [number]", title=titles)
for ax, (_, seen) in zip(axes, runs.values(), strict=True):
    ax.scatter([s for s, _ in seen], [t for _, t in seen], s=6)
    ax.set_xlim(0, 125)
text = "Each dot is a token; a step that reads new prompts and writes makes two calls."
caption(
    fig,
    kind="measured",
    text=text,
    numbers={n: seen[-1][0] + 1 for n, (_, seen) in runs.items()},
)

# %% [markdown]
# Every text is what it would be alone: nobody pays with quality.

# %%
alone = [Batcher(small, pages=20, page_size=16).run([request])[0] for request in requests]
together = Batcher(small, pages=100, page_size=16, max_batch=5).run(requests)
equal = sum(one == other for one, other in zip(alone, together, strict=True))
print(f"texts equal to what they are alone: {equal} of {len(alone)}")

# %% [markdown]
# ## 6 · A real server
# `Server` puts this behind HTTP, with the route that OpenAI's clients know. We train a small model for a few seconds to
# have something to serve.

# %% tags=["timing"]
trained = train(TrainConfig(steps=60, batch_size=16, seq_len=64, log_every=0, eval_every=0))
model, tokenizer = trained.model, trained.tokenizer
server = Server(model, tokenizer, pages=400, page_size=16, max_batch=16)
print("serving at", server.url, "which is this machine only")


# %% tags=["setup"]
def ask(url: str, **body) -> dict:
    """One completion, as any HTTP client would ask for it."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


# %%
got = ask(server.url, prompt='The "with" statement', max_tokens=12, temperature=0)
local = generate(model, tokenizer, 'The "with" statement', max_new_tokens=12, greedy=True)
print("fields:", sorted(got))
print("usage:", got["usage"])
print("the same as generate:", got["choices"][0]["text"] == local)

# %% [markdown]
# %% tags=["timing"]
print(repr(got["choices"][0]["text"]))

# %% [markdown]
# Sixty steps of training write no better. The same works from a shell, on any trained model: `fmlab serve OUT/model`. Bad
# requests are told what is wrong:

# %%
try:
    ask(server.url, prompt="The", max_tokens=12, temperatur=0)
except urllib.error.HTTPError as error:
    print(error.code, json.loads(error.read())["error"]["message"][:60], "…")

# %% [markdown]
# ## 7 · Under load
# Forty requests of very different lengths, all at once. Users feel two times: until the **first token**, and from token to
# token.

# %%
prompts = ["The", "A class is", "If the", "An exception"]
bodies = [
    dict(prompt=prompts[i % 4], max_tokens=60 if i % 5 == 0 else 8, temperature=0)
    for i in range(40)
]

# %% tags=["timing"]
reports = {}
for name, options in {
    "one by one": dict(max_batch=1),
    "static batches": dict(max_batch=8, continuous=False),
    "continuous": dict(max_batch=8),
}.items():
    with Server(model, tokenizer, pages=400, max_waiting=64, **options) as other:
        reports[name] = run_load(other.url, bodies)

# %% tags=["timing"]
columns = {
    "tokens/s": [round(r.tokens_per_second) for r in reports.values()],
    "first token, median [ms]": [round(1e3 * r.first(0.5)) for r in reports.values()],
    "first token, 95 % [ms]": [round(1e3 * r.first(0.95)) for r in reports.values()],
    "then a token [ms]": [round(1e3 * r.between(0.5), 1) for r in reports.values()],
}
Table({"server": reports, **columns}, kinds=dict.fromkeys(columns, "measured"))

# %%
texts = [[answer.text for answer in report.answers] for report in reports.values()]
alike = sum(len(set(three)) == 1 for three in zip(*texts, strict=True))
print("requests that failed:", sum(report.failed for report in reports.values()))
print(f"texts that all three servers wrote alike: {alike} of {len(bodies)}")

# %% [markdown]
# A static batch keeps its places until its longest text ends. Continuous batching gives each place to the next text at once:
# all wait less, and more tokens are written a second.

# %% [markdown]
# ## 8 · What breaks: padding that is taken for text
# Texts of one batch differ in length. If the shorter ones are padded and the mask is forgotten, the model reads the padding
# as text, and nothing fails.

# %%
long, short = tokenizer.encode("An exception is raised when"), tokenizer.encode("The with")
pad = [0] * (len(long) - len(short))
batch = torch.tensor([long, pad + short])
mask = torch.tensor([[1] * len(long), [0] * len(pad) + [1] * len(short)])
with torch.no_grad():
    right = model(torch.tensor([short])).logits[0, -1]
    masked = model(batch, attention_mask=mask).logits[1, -1]
    forgotten = model(batch).logits[1, -1]
within("with the mask, off by", (masked - right).abs().max().item(), below=1e-3)
within("without it, off by", (forgotten - right).abs().max().item(), above=0.1)

# %% [markdown]
# Nothing failed. Only a comparison with the text alone gives it away: keep it as a test.

# %% tags=["timing"]
server.close()
print("closed")

# %% [markdown]
# ## Exercises
# ### Exercise 1.8.1 (core): how many bytes of pages do these texts hold?


# %% exercise="1.8.1"
def paged_bytes(lengths, page_size, layers, kv_heads, head_size, itemsize) -> int:
    """Bytes of all pages that texts of these lengths (in tokens) hold, over all layers.

    Every text has pages of its own, of page_size tokens; a page that is begun is held whole.
    """
    # BEGIN SOLUTION
    pages = sum(-(-length // page_size) for length in lengths)
    return pages * page_size * 2 * layers * kv_heads * head_size * itemsize
    # END SOLUTION


# %% check="1.8.1"
check("1.8.1", paged_bytes)

# %% [markdown]
# ### Exercise 1.8.2 (core): how long does one decode step take at least?


# %% exercise="1.8.2"
def decode_seconds(parameters, batch, itemsize, cache_bytes, flops, bandwidth) -> float:
    """Least time of one decode step of `batch` texts, by the roofline.

    Every parameter of `itemsize` bytes is read once a step and does 2 operations for each text; each text
    also has cache_bytes of keys and values read. flops [1/s], bandwidth [B/s]; both overlap. Attention's own
    arithmetic is left out.
    """
    # BEGIN SOLUTION
    compute = 2 * parameters * batch / flops
    read = (parameters * itemsize + batch * cache_bytes) / bandwidth
    return max(compute, read)
    # END SOLUTION


# %% check="1.8.2"
check("1.8.2", decode_seconds)

# %% [markdown]
# ### Exercise 1.8.3 (optional): who may come in?


# %% exercise="1.8.3"
def admit(waiting, free_pages, page_size, running) -> int:
    """How many of the waiting texts come in now: first come, first served, nobody overtakes.

    waiting: their lengths in tokens, oldest first. A text needs pages for its tokens and the one it writes
    next. One free page is kept for each of the `running` texts, which may need it for their next token.
    """
    # BEGIN SOLUTION
    free, count = free_pages - running, 0
    for tokens in waiting:
        free -= -(-(tokens + 1) // page_size)
        if free < 0:
            break
        count += 1
    return count
    # END SOLUTION


# %% check="1.8.3"
check("1.8.3", admit)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Pope et al. 2022, arXiv:2211.05102, section 2: prefill and decode, and what bounds each on TPUs.
# - Yu et al. 2022, *Orca*, OSDI, section 3: scheduling by iterations.
# - Kwon et al. 2023, arXiv:2309.06180, sections 3 and 4: where cache memory goes, and pages.
# - Agrawal et al. 2023, arXiv:2308.16369: long prompts cut up, so that they do not stop everyone's decoding.
# - Leviathan et al. 2023, arXiv:2211.17192: a small model drafts, the large one checks several tokens in one call.
# - Williams, Waterman and Patterson 2009, *Roofline*: the model itself.
