"""A folder of images: what can be read is read as it is, and all else is refused with its name and reason."""

import json
from pathlib import Path

import pytest
import torch

from fmlab.data.captioned import CaptionedSampler, load_captioned
from fmlab.data.image_folder import read_image_folder
from fmlab.data.shapes import agreement

Image = pytest.importorskip("PIL.Image")
SIZE = 16


def picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (SIZE, SIZE), shade: int = 200) -> None:
    Image.new(mode, size, (shade, 0, 0) if mode == "RGB" else 0).save(path)


def folder(tmp_path: Path, count: int = 3) -> Path:
    for i in range(count):
        picture(tmp_path / f"{i}.png", shade=100 + i)
        (tmp_path / f"{i}.txt").write_text(f"picture {i}")
    return tmp_path


def test_pixels_and_captions_are_as_they_were(tmp_path):
    images, captions = read_image_folder(folder(tmp_path), SIZE)
    assert captions == ["picture 0", "picture 1", "picture 2"]
    assert images.shape == (3, 3, SIZE, SIZE)
    assert images[:, 0, 0, 0].tolist() == [100, 101, 102]
    assert not images[:, 1:].any()
    (tmp_path / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": f"{i}.png", "text": f"listed {i}"}) + "\n" for i in range(3))
    )
    assert read_image_folder(tmp_path, SIZE)[1] == ["listed 0", "listed 1", "listed 2"]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: picture(p / "1.png", "L"), r"1\.png has mode L \(grey\): convert it to RGB"),
        (lambda p: picture(p / "1.png", "RGBA"), r"mode RGBA \(transparency\)"),
        (lambda p: picture(p / "1.png", size=(SIZE, 20)), r"1\.png has 16x20 pixels: .* scale it to 16x16"),
        (lambda p: (p / "1.png").write_bytes(b"GIF no"), r"1\.png is no image"),
        (lambda p: (p / "1.png").write_bytes((p / "1.png").read_bytes()[:-30]), r"1\.png is damaged"),
        (lambda p: (p / "1.txt").unlink(), r"1\.png has no caption in 1\.txt"),
        (lambda p: (p / "1.txt").write_text(" \n"), r"1\.png has no caption"),
        (lambda p: (p / "1.txt").write_bytes(b"caf\xe9"), r"1\.txt is no UTF-8 text"),
        (lambda p: (p / "metadata.jsonl").write_text('{"file_name": "0.png"}'), r"metadata\.jsonl, line 1"),
        (
            lambda p: [f.unlink() for f in p.glob("*.png")],
            r"holds no image; legal are files ending with \.png",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, break_it, message):
    break_it(folder(tmp_path))
    with pytest.raises(ValueError, match=message):
        read_image_folder(tmp_path, SIZE)


def test_sets_are_split_and_sampled(tmp_path):
    train, kept = load_captioned(folder(tmp_path, 12), SIZE, validation=0.25)
    assert len(train) + len(kept) == 12
    assert not set(train.captions) & set(kept.captions)
    sampler = CaptionedSampler(train, None, batch_size=3)
    halves = [CaptionedSampler(train, None, 4, rank=r, world_size=2).batch(0)["pixel_values"] for r in (0, 1)]
    assert torch.equal(torch.cat(halves), CaptionedSampler(train, None, 4).batch(0)["pixel_values"])
    state = sampler.state_dict()
    (tmp_path / "0.txt").write_text("another caption")
    other = CaptionedSampler(load_captioned(tmp_path, SIZE, 0.25)[0], None, batch_size=3)
    if other.data.captions != train.captions:
        with pytest.raises(ValueError, match="cannot resume with other data"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="too few for a batch of 99"):
        CaptionedSampler(train, None, batch_size=99)
    with pytest.raises(ValueError, match="no set of captioned images: legal are shapes, shapes-one"):
        load_captioned("shape", SIZE)


def test_shapes_are_a_set_like_any_other():
    train, kept = load_captioned("shapes-one", 32)
    assert agreement(kept.images(range(40)), list(kept.captions[:40])) == 1
    assert train.fingerprint != kept.fingerprint
