"""Writing a checkpoint: cut off after any operation the folder holds a whole one; a full disk loses none."""

import errno
import json
import os
import random
import shutil
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from fmlab import storage
from fmlab.storage import StorageError
from fmlab.train import checkpoint
from fmlab.train.checkpoint import RunState
from fmlab.train.saver import Saver
from tests.soak.damage import Written, damage
from tests.soak.power_cut import Disk
from tests.train.tiny_run import tiny_engine, tiny_model, tiny_tokenizer

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for the names of files")


def state(step: int) -> RunState:
    return RunState(step, step, {"step": step}, [0.5] * step, {})


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@linux
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_plug_pulled_after_every_operation_of_a_save(tmp_path, overwrite):
    """The old state or the new one, whole, and the new one once `save` has returned. With `overwrite`, a run
    that was taken back to step 2 comes to step 4 again."""
    out = tmp_path / "run"
    written = Written(out)  # steps 2 and 4
    if overwrite:
        (out / "latest").write_text("000002")
    step, old = (4, 2) if overwrite else (6, 4)
    with torch.no_grad():
        for parameter in written.engine.model.parameters():
            parameter += 1
    disk = Disk(out, tmp_path / "notes")
    written.saver.keep = 1
    with disk.watching():
        written.saver.save(state(step))
    written.was[step] = written.now()
    if not overwrite:
        assert checkpoint.steps(out) == [6]
    seen: dict[str, list[int]] = {}
    for what, folder in disk.states():
        checkpoint.sweep(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is passed over
            _, found = checkpoint.resume(folder, written.engine)
        assert found.step in (old, step), what
        assert written.holds(found.step), what
        seen.setdefault(what.split()[0], []).append(found.step)
    for kind, came in seen.items():
        assert came == sorted(came, key=lambda s: s == step), f"{kind}: a way back"
        assert (came[0], came[-1]) == (old, step), kind


@linux
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_every_operation_may_fail(tmp_path, number):
    """A full disk, a broken one: said as such, the old checkpoint stays, the next save
    is fine."""
    written = Written(tmp_path / "run")
    count = Disk(written.out, tmp_path / "count")
    count._note = lambda: None
    with count.watching():
        written.saver.save(state(6))
    for fail_at in range(len(count.operations)):
        out = tmp_path / f"{fail_at}"
        shutil.copytree(written.out, out)
        shutil.rmtree(checkpoint.folder_of(out, 6))
        (out / "latest").write_text("000004")
        saver = Saver(out, written.engine, written.tokenizer, keep=5)
        disk = Disk(out, tmp_path / "none")
        with disk.watching(fail_at, OSError(number, os.strerror(number))):
            try:
                saver.save(state(6))
            except StorageError as error:
                text = str(error)
                assert ("disk is full" in text) == (number == errno.ENOSPC), text
        checkpoint.sweep(out)
        path, found = checkpoint.resume(out, written.engine)
        assert found.step in (4, 6)
        assert not checkpoint.damage(path)
        saver.save(state(8))
        assert checkpoint.latest(out).name == "000008"
        shutil.rmtree(out)


def test_damaged_files_are_passed_over_or_named(tmp_path):
    counts = damage(tmp_path, 40, random.Random(0))
    assert counts == {"passed over for the older one": 32, "refused by name": 8}


def test_beside_the_steps_the_state_of_the_call_is_written(tmp_path, monkeypatch):
    engine, go_on, done = tiny_engine(), threading.Event(), []
    saver = Saver(tmp_path, engine, tiny_tokenizer(), beside=True, done=lambda step, path: done.append(step))
    write = storage.write_tensors

    def slow(*args):
        assert go_on.wait(20)
        return write(*args)

    monkeypatch.setattr(storage, "write_tensors", slow)
    before = {name: p.clone() for name, p in engine.full_params().items()}
    saver.save(state(1))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()  # the next step
    assert checkpoint.steps(tmp_path) == done == []
    go_on.set()
    saver.wait()
    assert done == [1]
    checkpoint.resume(tmp_path, engine)
    assert all(torch.equal(p, before[name]) for name, p in engine.full_params().items())


def test_what_the_writer_met_beside_the_steps_is_raised_at_the_next_save(tmp_path, monkeypatch):
    saver = Saver(tmp_path, tiny_engine(), tiny_tokenizer(), beside=True)
    saver.save(state(1))
    saver.wait()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "enter_files", full)
        saver.save(state(2))
        with pytest.raises(StorageError, match="disk is full"):
            saver.save(state(3))
    assert [p.name for p in (tmp_path / "steps").iterdir()] == ["000001"]
    saver.save(state(4))
    saver.close()  # at an error elsewhere: what can become whole does
    assert checkpoint.steps(tmp_path) == [1, 4]


def test_what_did_not_change_is_linked_and_written_anew_when_it_is_damaged(tmp_path):
    model = tiny_model()
    model.blocks[0].requires_grad_(False)
    engine = tiny_engine(model)
    saver = Saver(tmp_path, engine, tiny_tokenizer(), keep=3)
    saver.save(state(1))
    saver.save(state(2))
    one, two, three = (checkpoint.folder_of(tmp_path, step) for step in (1, 2, 3))
    for name in ("frozen.safetensors", "tokenizer.json"):
        assert (one / name).samefile(two / name)
        spoil(two / name)
    assert not (one / "model.safetensors").samefile(two / "model.safetensors")
    saver.save(state(3))
    assert checkpoint.damage(one)
    assert checkpoint.damage(two)
    assert not checkpoint.damage(three)
    with torch.no_grad():
        next(model.blocks[0].parameters()).add_(1)  # behind the engine's back
    saver.save(state(4))
    assert not (three / "frozen.safetensors").samefile(
        checkpoint.folder_of(tmp_path, 4) / "frozen.safetensors"
    )
    was = engine.full_params()["blocks.0.tokens.weight"].clone()
    checkpoint.resume(tmp_path, engine)
    assert torch.equal(engine.full_params()["blocks.0.tokens.weight"], was)


def test_some_are_kept_for_good(tmp_path):
    saver = Saver(tmp_path, tiny_engine(), tiny_tokenizer(), keep=1, keep_every=4)
    for step in range(1, 7):
        saver.save(state(step))
    assert checkpoint.steps(tmp_path) == [4, 6]


def test_a_checkpoint_from_before_manifests_had_a_checksum_is_read(tmp_path):
    written = Written(tmp_path)
    file = checkpoint.latest(tmp_path) / "manifest.json"
    now = json.loads(file.read_text())
    tensors = {name: entry for name, entry in now["files"].items() if name.endswith(".safetensors")}
    file.write_text(json.dumps({"version": 1, "files": tensors}))
    assert checkpoint.resume(tmp_path, written.engine)[1].step == 4
    assert written.holds(4)
    file.write_text(json.dumps(now | {"version": 1}))  # no way round the checksum
    assert "manifest.json is damaged" in checkpoint.damage(file.parent)


def test_files_of_others_are_not_loaded(tmp_path):
    """A table that is a pickle, and tables that lie about what they hold."""
    engine = tiny_engine()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(StorageError, match="could run any code: it is not loaded"):
        engine.load(tmp_path / "dcp")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "manifest.json").write_text('{"version": 3, "files": {}}')
    with pytest.raises(StorageError, match="of version 3 and this fmlab reads 1 and 2"):
        engine.load(tmp_path / "new")
    block = {"tensor": "w", "shape": [4], "offsets": [0], "sizes": [4], "dtype": "float32"}
    for i, (change, said) in enumerate(
        [
            ({"sizes": [2]}, "not the whole"),
            ({"offsets": [-1]}, "outside"),
            ({"dtype": "save"}, "no element type"),
            ({"shape": [10**9], "sizes": [10**9]}, "would have 4000000000"),
            ({"shape": None}, "damaged"),
        ]
    ):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        entry = storage.write_tensors(folder / "part-0000.safetensors", {"w@0": torch.zeros(4)})
        storage.write_manifest(
            folder, {"part-0000.safetensors": {**entry, "blocks": {"w@0": block | change}}}
        )
        with pytest.raises(StorageError, match=said):
            engine.load(folder)
    storage.write_manifest(tmp_path, {"../escaped": {"bytes": 0, "sha256": ""}})
    with pytest.raises(StorageError, match="no file of this folder"):
        engine.load(tmp_path)
