"""Storage: nothing half-written, damage named by file, a full disk loses nothing."""

import os
import resource

import pytest
import torch

from fmlab import storage
from fmlab.storage import StorageError, atomic_directory, load_metadata, load_tensors, save_tensors


def write(path, value, **kwargs):
    with atomic_directory(path, **kwargs) as folder:
        save_tensors(folder, {"w": torch.full((1000,), float(value))}, metadata={"step": value})


def interrupted(path):
    with atomic_directory(path, overwrite=True) as folder:
        save_tensors(folder, {"w": torch.zeros(3)})
        raise RuntimeError("boom")


def test_round_trip_keeps_every_dtype_view_and_tie(tmp_path):
    table = torch.randn(4, 6)
    tensors = {
        "tied.a": table,
        "tied.b": table,
        "transposed": table.t(),
        "row": table[1],
        "half": torch.randn(3).bfloat16(),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    with atomic_directory(tmp_path / "c") as folder:
        save_tensors(folder, tensors)
    loaded = load_tensors(tmp_path / "c")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert loaded["tied.a"] is loaded["tied.b"]


def test_a_failure_in_the_middle_leaves_the_old_folder_and_no_rubbish(tmp_path):
    write(tmp_path / "c", 1)
    with pytest.raises(RuntimeError, match="boom"):
        interrupted(tmp_path / "c")
    assert load_tensors(tmp_path / "c")["w"][0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    with pytest.raises(ValueError, match="exists already"):
        write(tmp_path / "c", 2)
    write(tmp_path / "c", 2, overwrite=True)
    assert load_metadata(tmp_path / "c") == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_says_so_and_loses_nothing(tmp_path):
    """The kernel refuses to let a file grow beyond a limit, as it does on a full disk."""
    write(tmp_path / "c", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with (
            pytest.raises(StorageError, match="disk is full"),
            atomic_directory(tmp_path / "c", overwrite=True) as f,
        ):
            save_tensors(f, {"w": torch.zeros(200_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_tensors(tmp_path / "c")["w"][0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "delete", "{", "{}", "[]", '{"files": {"tensors.safetensors": {}}}']
)
def test_damage_is_named_by_file(tmp_path, damage):
    write(tmp_path / "c", 1)
    file = tmp_path / "c" / "tensors.safetensors"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "delete":
        file.unlink()
    else:
        file = tmp_path / "c" / "manifest.json"
        file.write_text(damage)
    with pytest.raises(StorageError, match=file.name):
        load_tensors(tmp_path / "c")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(StorageError, match="not a checkpoint"):
        load_tensors(tmp_path)


def test_unwritable_and_too_small_are_found_before_work_starts(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write to"):
        storage.check_writable(tmp_path / "file" / "runs")
    with pytest.raises(StorageError, match="are needed"):
        storage.check_free_space(tmp_path / "not" / "yet" / "there", 1 << 60)
    assert storage.check_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert os.listdir(tmp_path / "a" / "b") == []


class _NoAddress(torch.Tensor):
    """Like a tensor of torch_xla, which shows 0; what is computed from it is plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self):
        return 0


def test_tensors_without_an_address_are_all_kept(tmp_path):
    one, other = (tensor.as_subclass(_NoAddress) for tensor in (torch.ones(3), torch.zeros(3)))
    with atomic_directory(tmp_path / "saved") as folder:
        save_tensors(folder, {"one": one, "other": other, "again": one})
    found = load_tensors(tmp_path / "saved")
    assert found["one"].tolist() == found["again"].tolist() == [1.0] * 3
    assert found["other"].tolist() == [0.0] * 3


def test_of_two_writers_of_one_name_the_first_wins(tmp_path):
    """Also when the second began before: what is there is never replaced without being asked."""

    def late():
        with atomic_directory(tmp_path / "saved") as folder:
            write_who(folder, "late")
            with atomic_directory(tmp_path / "saved") as other:
                write_who(other, "early")

    def write_who(folder, name):
        (folder / "who").write_text(name)

    with pytest.raises(ValueError, match="exists already"):
        late()
    assert (tmp_path / "saved" / "who").read_text() == "early"
    assert os.listdir(tmp_path) == ["saved"]
