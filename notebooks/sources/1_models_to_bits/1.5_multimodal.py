# The two trainings take most of the time.

# %% [markdown]
# **You will learn** how an image becomes tokens, what CLIP compares, why ranks must share it, and how a decoder sees.

# %% tags=["setup"]
import torch
from fmlab.lab import (
    LiveCurve,
    Row,
    Table,
    caption,
    check,
    compare,
    figure,
    predict,
    show_source,
    within,
)

# %load_ext fmlab.lab
SIZE, PATCH = 32, 8  # pixels: side of our images, and of a patch

# %% tags=["setup"]
from fmlab.data.shapes import ShapesDataset, ShapesSampler, ShapesTokenizer
from fmlab.models import CLIP, CLIPConfig, CLIPTextConfig, CLIPVision, CLIPVisionConfig, State
from fmlab.models.clip_towers import ImageEmbedding, patchify
from fmlab.objectives import Contrastive, gather, total_loss
from fmlab.train.caption import retrieval_accuracy

torch.set_num_threads(1)  # so small a model loses more to a second thread than it gains

# %% [markdown]
# ## 1 · An image is a row of patches
# Our images are drawn from a seed, so what they show is known, and can be read back from pixels: every claim below is
# measured.

# %%
examples = ShapesDataset(4, seed=3)
fig, axes = figure(x=["x [pixels]"] * 4, y="y [pixels]", title=["A", "B", "C", "D"], height=2.3)
for ax, image in zip(axes, examples.images(), strict=True):
    ax.imshow((image.permute(1, 2, 0) + 1) / 2)
    ax.grid(False)
for name, text in zip("ABCD", examples.captions, strict=True):
    print(f"{name}: {text}")
caption(fig, kind="given", text="Four images of 32 x 32 pixels, with their captions above.")

# %% [markdown]
# A transformer wants a row of vectors. So cut the image into squares, and let one matrix turn the pixels of a square
# into a vector. A **class token** goes in front, to gather what the image is about.

# %%
show_source(ImageEmbedding.forward)

# %% [markdown]
# This is a *vision transformer*, ViT. In the name ViT-B/32, B is the size (base) and 32 the side of a patch in pixels.

# %%
guess_tokens = predict(
    "CLIP ViT-B/32: 224 x 224 pixels, patches of 32. How many tokens?", unit="tokens"
)
guess_tokens


# %%
def on_paper(name: str, **overrides) -> CLIPVision:
    """An image tower without memory: shapes only."""
    with torch.device("meta"):
        return CLIPVision.from_preset(name, **overrides)


towers = {
    "ViT-B/32": on_paper("clip-vit-b-32"),
    "ViT-B/16": on_paper("clip-vit-b-16"),
    "ViT-L/14": on_paper("clip-vit-l-14"),
    "ViT-L/14 at 336": on_paper("clip-vit-l-14", image_size=336),
}

# %%
sizes = [tower.config.image_size for tower in towers.values()]
seen = [
    tower(torch.empty(1, 3, size, size, device="meta")).image_hidden.shape[1]
    for tower, size in zip(towers.values(), sizes, strict=True)
]
compare(
    "tokens of ViT-B/32",
    yours=guess_tokens,
    formula=(224 // 32) ** 2 + 1,
    measured=seen[0],
    unit="tokens",
)

# %%
Table(
    {
        "tower": towers,
        "tokens": seen,
        "parameters": [tower.num_parameters() for tower in towers.values()],
        "matrix of the patches": [tower.blocks[0].patches.numel() for tower in towers.values()],
    },
    kinds={"tokens": "measured", "parameters": "measured", "matrix of the patches": "measured"},
)

# %% [markdown]
# Halving the patch's side makes four times the tokens with *fewer* parameters: the matrix shrinks. Other codes say
# *convolution* for this step. It is the same:

# %%
matrix = torch.randn(64, 3, PATCH, PATCH)
by_patches = patchify(examples.images(), PATCH) @ matrix.flatten(1).T
by_convolution = (
    torch.nn.functional.conv2d(examples.images(), matrix, stride=PATCH).flatten(2).mT
)
print("tokens", list(by_patches.shape))
within("largest difference", (by_patches - by_convolution).abs().max().item(), below=1e-4)

# %% [markdown]
# ## 2 · CLIP: two towers, one space
# *Contrastive language-image pre-training*: one tower reads images, one texts. Each ends in a unit vector; the product
# of two says how well they fit. Ours, saved and loaded by transformers:

# %%
vision = CLIPVisionConfig(
    image_size=SIZE, patch_size=PATCH, num_layers=3, hidden_size=64, num_heads=2
)
text = CLIPTextConfig(
    vocab_size=19, max_positions=12, num_layers=2, hidden_size=64, num_heads=2, eos_token_id=3
)


def small_clip(seed: int = 0) -> CLIP:
    torch.manual_seed(seed)
    return CLIP(CLIPConfig(text, vision, projection_size=48))


# %%
import tempfile

from transformers import CLIPModel, logging

logging.set_verbosity_error()
logging.disable_progress_bar()

clip = small_clip()
with tempfile.TemporaryDirectory() as folder:
    clip.save_pretrained(folder)
    theirs = CLIPModel.from_pretrained(folder)

# %%
words = ShapesTokenizer()
pairs = {"pixel_values": examples.images(), **words.batch(examples.captions)}
objective = Contrastive()
loss = total_loss(objective(clip, pairs), objective.counts(pairs))
reference = theirs(**pairs, return_loss=True).loss
loss.backward()
reference.backward()
ours_grad = clip.blocks[0].patches.grad
their_grad = theirs.vision_model.embeddings.patch_embedding.weight.grad
off = (ours_grad - their_grad).norm() / their_grad.norm()
print(f"{clip.num_parameters():,} parameters")
within("the losses differ by", abs(loss - reference).item(), below=1e-5, unit="nats")
within("the patches' gradients differ by", off.item(), below=1e-4, unit="of their norm")

# %% [markdown]
# ## 3 · Which text belongs to which image?
# In a batch of B pairs, each image has one right text and B - 1 wrong ones, and the other way round. No labels: the
# batch itself is the question.

# %%
show_source(Contrastive.__call__)

# %%
guess_start = predict("All vectors equal, batch of 64: what is the loss?", unit="nats")
guess_start


# %%
def loss_of(images: torch.Tensor, texts: torch.Tensor, scale: float) -> float:
    """The contrastive loss of given vectors, scaled to length 1."""
    images, texts = (torch.nn.functional.normalize(x, dim=-1) for x in (images, texts))
    state = State(
        image_embeddings=images, text_embeddings=texts, logit_scale=torch.tensor(scale)
    )
    rows = {"pixel_values": images}
    return total_loss(objective(lambda **_: state, rows), objective.counts(rows)).item()


# %%
same = torch.ones(64, 16)
formula = torch.tensor(64.0).log().item()
compare(
    "loss",
    yours=guess_start,
    formula=formula,
    measured=loss_of(same, same, 14.3),
    unit="nats",
    digits=5,
)

# %% [markdown]
# ln B: nothing is known yet. A larger batch is a harder question. The **scale** (1 / temperature, learned, at most 100)
# sets how much a small difference counts:

# %%
noise = torch.Generator().manual_seed(0)
first, second = (torch.randn(1024, 256, generator=noise) for _ in range(2))
batches = [2, 8, 32, 128, 512, 1024]
fig, ax = figure(x="batch size B [pairs]", y="loss [nats]")
for scale in (1.0, 14.3, 100.0):
    losses = [loss_of(first[:n], second[:n], scale) for n in batches]
    ax.plot(batches, losses, marker="s", label=f"random vectors, scale {scale:g}")
ln_b = [torch.tensor(float(n)).log().item() for n in batches]
ax.plot(batches, ln_b, marker="o", markersize=4, linewidth=0, color="black", label="ln B")
ax.set_xscale("log", base=2)
ax.set_xticks(batches, [f"{n:,}" for n in batches])
ax.legend()
says = "Unrelated vectors: scale 1 stays at ln B, a large one punishes chance."
caption(fig, kind="measured", text=says, digits=2)

# %% [markdown]
# CLIP begins at 14.3 = 1 / 0.07. Too small, and even perfect vectors cannot win: with scale 1 the best possible loss for
# 64 pairs is

# %%
perfect = torch.eye(64)
for scale in (1.0, 14.3, 100.0):
    print(f"scale {scale:5}: loss of perfect vectors {loss_of(perfect, perfect, scale):.4f}")

# %% [markdown]
# ## 4 · Train it
# 200 steps of 64 pairs. Some combinations ("a red circle left of a blue square") are **held out**: never seen, though
# each object is.


# %%
def fit(model, objective, sampler, steps: int, lr: float, curve: LiveCurve) -> float:
    """Train what is not frozen; warm-up, then a straight line to 0. Returns the last loss."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
        batch = sampler.batch(step)
        loss = total_loss(objective(model, batch), objective.counts(batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 10 == 0:
            curve.add(step, train=loss.item())
    return loss.item()


# %% tags=["timing"]
shapes = ShapesDataset(20_000)
clip = small_clip()
with LiveCurve("Images and texts find each other.", y="loss [nats]") as curve:
    last = fit(clip, Contrastive(), ShapesSampler(shapes, 64), 200, 2e-3, curve)

# %%
unseen = ShapesDataset(100, seed=1, split="held-out")
candidates = len(set(unseen.scenes))
found, chance = retrieval_accuracy(clip, unseen), 1 / candidates
within("last loss, of ln 64 = 4.16", last, below=1.6, unit="nats")
within(f"right caption among {candidates}", 100 * found, above=50, unit="%")
compare(
    Row("blind", formula=100 * chance, unit="%", digits=2),
    Row("held-out images", measured=100 * found, unit="%", digits=2, noisy=True),
)

# %% [markdown]
# From scratch, in seconds, on combinations it never saw. Real CLIPs need more: 400 million pairs, batches of 32,768. Such
# a batch lives on many ranks. That is where it gets interesting.

# %% [markdown]
# ## 5 · Two ranks, one question
# With half of the pairs on each rank, each must see the other's vectors. An **all-gather** brings them. But what does it
# do to the gradient?

# %%
show_source(gather._GatherSumGradients)


# %%
class Dropped(Contrastive):
    """What torch.distributed.all_gather alone gives: the others' vectors, without their history."""

    def gather(self, images, texts):
        images, texts, first = super().gather(images, texts)
        return images.detach(), texts.detach(), first


# %%
def loss_and_gradient(objective, batch: dict, pairs: int) -> tuple[float, torch.Tensor]:
    """This process's share of the mean loss over `pairs`, and of the whole gradient as one vector."""
    model = small_clip()
    loss = total_loss(objective(model, batch), {name: pairs for name in objective.names})
    loss.backward()
    return loss.item(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


# %%
def weights_of(tower: str) -> torch.Tensor:
    """Which numbers of that vector belong to the blocks of a tower, bool."""
    blocks = [(type(b).__name__, sum(w.numel() for w in b.parameters())) for b in clip.blocks]
    return torch.cat([torch.full((count,), tower in name) for name, count in blocks])


towers_of = {
    "all": slice(None),
    "image tower": weights_of("Image"),
    "text tower": weights_of("Text"),
}
batch = ShapesSampler(shapes, 32).batch(0)
one_loss, one_gradient = loss_and_gradient(Contrastive(), batch, 32)
print(f"one device, 32 pairs: loss {one_loss:.2f}")

# %%
guess_lost = predict(
    "The gather drops gradients: how far off is the gradient, in % of its norm?", unit="%"
)
guess_lost

# %%
# %%ranks 2 -o answers
mine = {name: rows.chunk(2)[rank] for name, rows in batch.items()}
group = dist.group.WORLD
ways = {"alone": Contrastive(), "dropped": Dropped(group), "carried": Contrastive(group)}
answers = {}
for name, objective in ways.items():
    loss, gradient = loss_and_gradient(objective, mine, 32)
    both = torch.cat([torch.tensor([loss]), gradient])
    dist.all_reduce(both)  # as data parallelism does: losses and gradients of all ranks add up
    answers[name] = {"loss": f"{both[0]:.2f}"}
    for part, own in towers_of.items():
        off = (both[1:] - one_gradient)[own].norm() / one_gradient[own].norm()
        answers[name][part] = f"{100 * off:.0f} %"
print(f"{len(mine['pixel_values'])} pairs; carried is off by less than 0.01 %: {off < 1e-4}")
answers

# %%
results = answers[0]
columns = {"loss": [result["loss"] for result in results.values()]}
columns |= {"loss, one device": [f"{one_loss:.2f}"] * 3}
columns |= {f"off, {part}": [result[part] for result in results.values()] for part in towers_of}
Table({"gather": results, **columns}, kinds=dict.fromkeys(columns, "measured"))

# %%
lost = float(results["dropped"]["all"].split()[0])
compare("gradient lost", yours=guess_lost, measured=lost, unit="%", digits=2)

# %% [markdown]
# **What breaks**: *dropped* has the right loss to the last digit. No curve shows the bug; only the gradient gives it
# away: the text tower's is lost, the image tower's almost whole. Why so uneven?

# %%
with torch.no_grad():
    start = small_clip()(**batch)
for name in ("image_embeddings", "text_embeddings"):
    unit = torch.nn.functional.normalize(start[name], dim=-1)
    print(f"{name}: cosine of two, on average {(unit @ unit.T).mean():.2f}")

# %% [markdown]
# Before training all images look alike (0.99). So a text that asks "which image?" learns nothing: what moves the texts is
# the **images'** question, through the gathered texts. *Dropped* cuts just that.

# %% [markdown]
# *Alone*, each rank keeps both questions but has half the wrong answers: an easier one, 3.3 nats instead of 4.0, whose
# gradient points nearly the same way. With more ranks it gets easier still.

# %% [markdown]
# For the same reason **micro-batches**, parts of a batch that run one after the other, cannot add up to one batch here:
# pairs in different parts never meet. The engine refuses:

# %%
from fmlab.parallel import Layout, parallelize
from fmlab.train import adamw

try:
    parallelize(small_clip(), Layout(micro_batches=4), Contrastive(), adamw(1e-3))
except ValueError as error:
    print(error)

# %% [markdown]
# ## 6 · A decoder that sees
# CLIP compares; it cannot speak. LLaVA's idea: project the patches to the width of a language model, and put them where
# its words would be.

# %%
from fmlab.data.shapes import agreement, parse_caption, read_scene
from fmlab.models import LlamaConfig, VisionLanguage, VisionLanguageConfig
from fmlab.models.vision_language import ImageTextEmbedding
from fmlab.objectives import CausalLM
from fmlab.train.caption import caption_accuracy, caption_images

show_source(ImageTextEmbedding.forward)

# %%
shape = dict(num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_size=128)
decoder = LlamaConfig(19, 32, tie_embeddings=True, init_std=0.06, **shape)
torch.manual_seed(0)
model = VisionLanguage(
    VisionLanguageConfig(vision, decoder, image_token_id=words.image, feature_layer=-1)
)
row = words.caption_batch(["a red circle"], model.config.image_tokens)
compare(
    "places of an image",
    formula=(SIZE // PATCH) ** 2,
    measured=model.config.image_tokens,
    unit="tokens",
)

# %%
Table(
    {
        "place": range(15, 21),
        "input": [words.pieces[i] for i in row["input_ids"][0, 15:21]],
        "to predict": [words.pieces[i] if i >= 0 else "—" for i in row["labels"][0, 15:21]],
    },
    kinds={"place": "given", "input": "given", "to predict": "given"},
)

# %% [markdown]
# Only the caption is learned: no loss on the image's places. The tower comes from our CLIP; projector and decoder begin
# from nothing. LLaVA freezes its tower; ours has seen so little that it learns on.

# %% tags=["timing"]
for number in range(model.config.image_layers + 1):
    model.blocks[number].load_state_dict(clip.blocks[number].state_dict())

one_order = ShapesDataset(20_000, both_orders=False)
rows = ShapesSampler(one_order, 32, image_tokens=model.config.image_tokens)
with LiveCurve("A decoder learns to say what it sees.", y="loss [nats/word]") as curve:
    last = fit(model, CausalLM(), rows, 450, 3e-3, curve)

# %%
print(f"{model.num_parameters():,} parameters")
within("last loss", last, below=0.3, unit="nats/word")
frozen = sum(p.numel() for p in model.freeze_vision().parameters() if not p.requires_grad)
print(f"freeze_vision() would have kept {frozen:,} of them as they were")
_ = model.freeze_vision(False)

# %% [markdown]
# Is it right? We read the scene from the pixels of held-out images and compare it with the scene that the caption
# describes. All of it, then part by part:

# %%
PARTS = {
    "first colour": lambda scene: scene.first.colour,
    "first shape": lambda scene: scene.first.shape,
    "second colour": lambda scene: scene.second and scene.second.colour,
    "second shape": lambda scene: scene.second and scene.second.shape,
    "relation": lambda scene: scene.relation,
}
blind = dict(zip(PARTS, (100 / n for n in (4, 3, 4, 3, 2)), strict=True))  # one of so many


# %%
images = unseen.images()
said = [parse_caption(text) for text in caption_images(model, images)]
true = [read_scene(image) for image in images]
right = {
    name: sum(s is not None and part(s) == part(t) for s, t in zip(said, true, strict=True))
    for name, part in PARTS.items()
}
whole = 100 * caption_accuracy(model, unseen)
spoken = sum(scene is not None for scene in said)
within("captions that are sentences of the language", spoken, above=90, unit="of 100")
print(f"drawing one of the {candidates} held-out scenes is right in {chance:.1%}")
within("held-out scenes wholly right", whole, above=10, unit="%")

# %%
seen_before = ShapesDataset(100, seed=9, objects=(2,), both_orders=False)
compare(
    Row(
        "all right, seen combinations",
        measured=100 * caption_accuracy(model, seen_before),
        unit="%",
        noisy=True,
    ),
    Row("all right, held-out", measured=whole, unit="%", noisy=True),
    *(
        Row(name, formula=blind[name], measured=100 * n / len(true), unit="%", noisy=True)
        for name, n in right.items()
    ),
)

# %%
fig, axes = figure(x=["x [pixels]"] * 4, y="y [pixels]", title=["A", "B", "C", "D"], height=2.3)
for ax, image in zip(axes, images[:4], strict=True):
    ax.imshow((image.permute(1, 2, 0) + 1) / 2)
    ax.grid(False)
caption(
    fig, kind="given", text="Four held-out images; below, what they show and what was said."
)

# %% tags=["timing"]
told = caption_images(model, images[:4])
marks = ["✓" if agreement(images[i : i + 1], told[i : i + 1]) else "✗" for i in range(4)]
Table({"image": "ABCD", "shown": unseen.captions[:4], "said": told, "right": marks})

# %% [markdown]
# Honestly: a toy. The formula is blind guessing, one of 4 colours, 3 shapes, 2 relations: colours come first, and how
# the two lie it hardly knows yet. But nothing was picked: every held-out caption was counted.

# %% [markdown]
# ## What production systems do
# | system | what it adds |
# |---|---|
# | CLIP (2021) | 400 million pairs, B = 32,768; ViT-L/14: 256 V100, 12 days (section 2.5) |
# | OpenCLIP | as here, with its options `local_loss` and `gather_with_grad` |
# | SigLIP (2023) | a sigmoid for each pair: no softmax over the batch, no gather of all |
# | LLaVA 1.5 (2023) | ViT-L/14 at 336: 576 places an image; two-layer projector first, then the decoder too |

# %% [markdown]
# LLaVA 1.5 is the same class as above, in another shape:

# %%
with torch.device("meta"):
    llava = VisionLanguage.from_preset("llava-1.5-7b")
print(f"{llava.num_parameters():,} parameters, {llava.config.image_tokens} places an image")

# %% [markdown]
# ## Exercises
# ### Exercise 1.5.1 (core): cut images into patches


# %% exercise="1.5.1"
def cut(images: torch.Tensor, patch: int) -> torch.Tensor:
    """Return the patches of images [b, c, h, w] as [b, n, c * patch * patch].

    Patches in reading order, left to right, then down. Inside one, as a convolution's weight has it: channel first,
    then row, then column. Raise ValueError when the patch does not divide height and width.
    """
    # BEGIN SOLUTION
    b, c, h, w = images.shape
    if h % patch or w % patch:
        raise ValueError(f"patches of {patch} do not divide {h} x {w}")
    grid = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * patch * patch)
    # END SOLUTION


# %% check="1.5.1"
check("1.5.1", cut)

# %% [markdown]
# ### Exercise 1.5.2 (core): the loss, by hand
# Vectors come as they leave the towers: not yet of length 1.


# %% exercise="1.5.2"
def contrastive_loss(images: torch.Tensor, texts: torch.Tensor, scale: float) -> torch.Tensor:
    """images [B, e], texts [B, e], pair by pair -> CLIP's loss, a scalar; the batch is all here."""
    # BEGIN SOLUTION
    images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
    logits = scale * images @ texts.T
    target = torch.arange(len(logits))
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
    # END SOLUTION


# %% check="1.5.2"
check("1.5.2", contrastive_loss)

# %% [markdown]
# ### Exercise 1.5.3 (optional): the way back through a gather
# Forward, rank r contributed `sizes[r]` rows, stacked by rank. Backward, every rank holds a gradient for all rows.


# %% exercise="1.5.3"
def gather_backward(gradients: list[torch.Tensor], sizes: list[int], rank: int) -> torch.Tensor:
    """gradients[r] [B, e]: what rank r has for the gathered rows. Return the gradient of `rank`'s own rows.

    The loss is the sum of all ranks' losses.
    """
    # BEGIN SOLUTION
    first = sum(sizes[:rank])
    return sum(gradients)[first : first + sizes[rank]]
    # END SOLUTION


# %% check="1.5.3"
check("1.5.3", gather_backward)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Radford et al. 2021, *Learning Transferable Visual Models From Natural Language Supervision*, sections 2.3 to 2.5: CLIP.
# - Dosovitskiy et al. 2021, *An Image is Worth 16x16 Words*, section 3.1: patches as tokens.
# - Liu et al. 2023, *Visual Instruction Tuning* and *Improved Baselines with Visual Instruction Tuning*: LLaVA, 1.5.
# - Zhai et al. 2023, *Sigmoid Loss for Language Image Pre-Training*, section 3: without a softmax over the batch.
# - Oord et al. 2018, *Representation Learning with Contrastive Predictive Coding*, section 2.3: InfoNCE.
