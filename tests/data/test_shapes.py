"""Shapes: every image is read back as what its caption says; held-out combinations are never trained on."""

from dataclasses import replace

import pytest
import torch

from fmlab.data.shapes import (
    Scene,
    ShapesDataset,
    ShapesSampler,
    ShapesTokenizer,
    agreement,
    caption_of,
    parse_caption,
    read_scene,
    scenes,
)
from fmlab.data.shapes_scene import THINGS, Thing

RED, BLUE = Thing("red", "circle"), Thing("blue", "square", small=True)


@pytest.mark.parametrize("size", [16, 22, 32, 64])
@pytest.mark.parametrize("split", ["train", "held-out"])
def test_every_image_is_read_back_as_its_caption(size: int, split: str) -> None:
    data = ShapesDataset(150, seed=size, split=split, size=size)
    images = data.images()
    assert images.shape == (150, 3, size, size)
    assert set(images.unique().tolist()) == {-1.0, 1.0}
    assert agreement(images, data.captions) == 1
    assert agreement(images.flip(0), data.captions) < 0.2


def test_noise_is_borne_and_nonsense_is_not_read() -> None:
    data = ShapesDataset(100, objects=(1, 2))
    images = data.images()
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert agreement(images + 0.3 * noise, data.captions) > 0.97
    assert agreement(0.4 * images, data.captions) == 1  # pale, but nearer to its colour than to another
    blank = -torch.ones(3, 32, 32)
    assert read_scene(blank) is None
    assert caption_of(noise[0]) is None
    bar = blank.clone()
    bar[0, 3:5, 2:30] = 1
    assert read_scene(bar) is None  # no shape is half like it


def test_captions_say_the_scene_in_either_order() -> None:
    scene = Scene(RED, "left of", BLUE)
    assert scene.caption() == "a red circle left of a small blue square"
    assert scene.caption(swapped=True) == "a small blue square right of a red circle"
    for split in ("train", "held-out"):
        for scene in scenes(split, (2,)):
            assert parse_caption(scene.caption()) == scene == parse_caption(scene.caption(swapped=True))
    for wrong in ("", "a red", "a circle red", "a red circle left of", "a red circle beside a blue square"):
        assert parse_caption(wrong) is None


def test_held_out_combinations_are_never_in_training_while_their_objects_are() -> None:
    train, kept = scenes("train", (2,)), scenes("held-out", (2,))
    assert (len(scenes("train", (1,))), len(train), len(kept)) == (24, 980, 172)

    def plain(scene: Scene) -> Scene:
        assert scene.second is not None
        return Scene(replace(scene.first, small=False), scene.relation, replace(scene.second, small=False))

    assert not {plain(scene) for scene in train} & {plain(scene) for scene in kept}
    assert {thing for scene in train for thing in (scene.first, scene.second)} == set(THINGS)
    data = ShapesDataset(2000, split="held-out")
    assert set(data.scenes) <= set(kept)
    assert not set(ShapesDataset(2000).scenes) & set(kept)


def test_the_data_depends_on_the_seed_alone_and_ranks_share_a_batch() -> None:
    a, b = ShapesDataset(200, seed=5), ShapesDataset(200, seed=5)
    assert a.captions == b.captions
    assert torch.equal(a.images(), b.images())
    assert torch.equal(a[7][0], a.images(slice(7, 8))[0])
    assert a.captions != ShapesDataset(200, seed=6).captions
    one_order = ShapesDataset(200, seed=5, both_orders=False)
    assert one_order.scenes == a.scenes
    assert one_order.captions == [scene.caption() for scene in a.scenes]
    with pytest.raises(ValueError, match="cannot resume with other data; shapes"):
        ShapesSampler(one_order, 12).load_state_dict(ShapesSampler(a, 12).state_dict())
    whole = ShapesSampler(a, 12, seed=1).batch(30)
    ranks = [ShapesSampler(b, 12, seed=1, rank=rank, world_size=3).batch(30) for rank in range(3)]
    for name, tensor in whole.items():
        assert torch.equal(tensor, torch.cat([rank[name] for rank in ranks]))
    first = ShapesSampler(a, 12)
    for _ in zip(range(3), first, strict=False):
        pass
    resumed = ShapesSampler(b, 12, rank=1, world_size=2)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(next(iter(resumed))["input_ids"], first.batch(first.step)["input_ids"][6:])
    with pytest.raises(ValueError, match="with other data; seed: 0 in the checkpoint, 2 now"):
        ShapesSampler(a, 12, seed=2).load_state_dict(first.state_dict())


def test_the_tokenizer_takes_captions_apart_and_puts_them_together() -> None:
    tokenizer = ShapesTokenizer()
    assert tokenizer.vocab_size == 19
    captions = [s.caption(swapped) for s in scenes("train", (1,)) for swapped in (False,)]
    captions += [scenes("train", (2,))[-1].caption(True)]
    batch = tokenizer.batch(captions)
    assert batch["input_ids"].shape == (25, 12)
    assert [tokenizer.decode(ids) for ids in batch["input_ids"]] == captions
    assert torch.equal(batch["attention_mask"].sum(1), (batch["input_ids"] != tokenizer.pad).sum(1))
    assert tokenizer.encode("a purple circle")[1] == tokenizer.unk
    assert (batch["input_ids"] == tokenizer.eos).sum() == 25


def test_captions_for_a_decoder_have_labels_for_their_words_alone() -> None:
    tokenizer = ShapesTokenizer()
    batch = ShapesSampler(ShapesDataset(50), 8, image_tokens=5).batch(0)
    plain = ShapesSampler(ShapesDataset(50), 8).batch(0)
    ids, labels = batch["input_ids"], batch["labels"]
    assert (ids[:, :5] == tokenizer.image).all()
    assert torch.equal(ids[:, 5:], plain["input_ids"])
    assert (labels[:, :5] == -100).all()
    for row, words in zip(labels, plain["input_ids"], strict=True):
        assert row[row != -100].tolist() == words[words > tokenizer.bos].tolist()
    learnt = labels[:, :-1] != -100
    assert torch.equal(labels[:, :-1][learnt], ids[:, 1:][learnt])
    assert tokenizer.prompts(2, 3) == [[tokenizer.image] * 3 + [tokenizer.bos]] * 2


BAD = {
    "split": (lambda: ShapesDataset(split="test"), "legal are train, held-out"),
    "objects": (lambda: ShapesDataset(objects=(3,)), "legal: \\(1,\\), \\(2,\\), \\(1, 2\\)"),
    "one held-out object": (lambda: ShapesDataset(split="held-out", objects=(1,)), "take objects=\\(2,\\)"),
    "size": (lambda: ShapesDataset(size=15), "from 16 pixels"),
    "count": (lambda: ShapesDataset(0), "at least 1"),
    "batch": (lambda: ShapesSampler(ShapesDataset(10), 12), "more than the 10 images"),
    "channels": (lambda: read_scene(torch.zeros(1, 32, 32)), r"\[3,s,s\] .* got \[1, 32, 32\]"),
    "not square": (lambda: read_scene(torch.zeros(3, 32, 30)), r"got \[3, 32, 30\]"),
    "caption too long": (lambda: ShapesTokenizer().batch(["a " * 11]), "13 tokens does not fit into 12"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
