"""What the machine cannot do is refused with the line of the kernel, and what lives where."""

import re

import pytest
import torch

from fmlab.kernels.tiles import KernelError, hbm_bytes, run

X = torch.ones(128, 512)
BF16 = torch.bfloat16


def refused(kernel, *inputs: torch.Tensor) -> str:
    with pytest.raises(KernelError) as caught:
        run(kernel, *(inputs or (X,)))
    assert caught.value._render_traceback_() == [f"KernelError: {caught.value}"]
    return str(caught.value)


def test_the_message_begins_with_the_line_of_the_kernel() -> None:
    def kernel(nc, x):
        tile = nc.sbuf((128, 8))
        return nc.store(x, tile)

    assert re.match(r"line \d+ of kernel, `return nc.store\(x, tile\)`: ", refused(kernel))


def test_more_than_128_partitions() -> None:
    message = refused(lambda nc, x: nc.load(x), torch.ones(256, 8))
    assert "256 partitions, and there are 128" in message
    assert "256 partitions" in refused(lambda nc, x: nc.sbuf((256, 8)))


def test_out_of_sbuf_names_what_lives_there() -> None:
    def kernel(nc, x):
        weights = nc.sbuf((128, 40000))  # 156.25 KiB of each partition's 192
        cache = nc.sbuf((128, 16384), BF16, name="the cache")
        return weights, cache, nc.sbuf((128, 4096))

    message = refused(kernel)
    assert "out of SBUF" in message
    assert "needs 16 KiB of each partition, and 3.75 KiB of 192 KiB are free" in message
    assert re.search(r"156.2 KiB  weights \(128x40000 fp32\), made in line \d+ of kernel", message)
    assert "32 KiB  the cache (128x16384 bf16)" in message


def test_a_tile_larger_than_sbuf() -> None:
    message = refused(lambda nc, x: nc.load(x), torch.ones(128, 60_000))
    assert (
        "needs 234.4 KiB of each partition, and 192 KiB of 192 KiB are free. Nothing lives there" in message
    )


def test_out_of_psum_counts_banks() -> None:
    def kernel(nc, x):
        return [nc.psum((128, 512), name=f"sum {i}") for i in range(9)]

    message = refused(kernel)
    assert "out of PSUM" in message
    assert "needs 1 bank of each partition, and 0 banks of 8 banks are free" in message
    assert "sum 7" in message


def test_v3_has_more_sbuf() -> None:
    def kernel(nc, x):
        big = nc.sbuf((128, 50 * 1024))  # 200 KiB
        y = nc.hbm(x.shape)
        nc.store(y, nc.load(x))
        return y if big.shape else None

    assert "out of SBUF" in refused(kernel)
    assert run(kernel, X, core="v3").peak_sbuf == 128 * (200 + 2) * 1024


def test_tile_limits_of_the_tensor_engine() -> None:
    def multiply(m: int, n: int, psum: tuple[int, int] | None = None, k: int = 128):
        def kernel(nc, x):
            left, right = nc.memset(nc.sbuf((k, m)), 0), nc.memset(nc.sbuf((128, n)), 0)
            return nc.matmul(left, right, out=nc.psum(psum) if psum else None)

        return kernel

    assert "the stationary tile has at most 128" in refused(multiply(129, 512))
    assert "the moving tile has at most 512" in refused(multiply(128, 513))
    assert "contraction runs along the partitions" in refused(multiply(128, 512, k=64))
    assert "the result has shape (128, 512)" in refused(multiply(128, 512, (128, 256)))


def test_psum_and_sbuf_have_their_engines() -> None:
    def psum_as_input(nc, x):
        tile = nc.load(x, dtype=BF16)
        total = nc.matmul(tile[:, :128], tile)
        return nc.matmul(total[:, :128], tile)

    def store_psum(nc, x):
        y, tile = nc.hbm(x.shape), nc.load(x)
        nc.store(y, nc.matmul(tile[:, :128], tile))
        return y

    def product_into_sbuf(nc, x):
        tile = nc.load(x)
        return nc.matmul(tile[:, :128], tile, out=nc.sbuf((128, 512)))

    def mask_in_psum(nc, x):
        tile = nc.load(x)
        total = nc.matmul(tile[:, :128], tile)
        return nc.affine_select(total, base=0, partition=1, step=-1, otherwise=0.0)

    def both_in_psum(nc, x):
        tile = nc.load(x)
        return nc.tensor_tensor(nc.matmul(tile[:, :128], tile), nc.matmul(tile[:, :128], tile), "add")

    assert "total (128x128 fp32) is in PSUM: copy it to SBUF first" in refused(psum_as_input)
    assert "is in PSUM: copy it to SBUF first" in refused(store_psum)
    assert "the tensor engine writes PSUM" in refused(product_into_sbuf)

    def too_wide(nc, x):
        return nc.copy(nc.memset(nc.sbuf((128, 70_000), BF16), 0))

    assert "walks at most 65536 elements a partition in SBUF" in refused(too_wide)
    assert "gpsimd cannot reach PSUM" in refused(mask_in_psum)
    assert "may be in PSUM, not both" in refused(both_in_psum)


def test_reading_what_was_never_written() -> None:
    def never(nc, x):
        return nc.activation("exp", nc.sbuf((128, 8)))

    def in_part(nc, x):
        tile = nc.sbuf((128, 1024))
        nc.load(x, out=tile[:, :512])
        return nc.reduce("add", tile)

    def adding_to_nothing(nc, x):
        tile = nc.load(x)
        return nc.matmul(tile[:, :128], tile, out=nc.psum((128, 512)), accumulate=True)

    assert "was never written: load or compute it first" in refused(never)
    assert "tile (128x1024 fp32) is read, but it was written only in part" in refused(in_part)
    assert "begin with accumulate=False" in refused(adding_to_nothing)


def test_use_after_free_and_stale_places_of_a_ring() -> None:
    def freed(nc, x):
        tile = nc.load(x)
        tile.free()
        return nc.reduce("add", tile)

    def stale(nc, x):
        ring = nc.ring(2, x.shape)
        first, _, _ = (nc.load(x, out=ring.next()) for _ in range(3))
        return nc.reduce("add", first)

    def ring_freed(nc, x):
        nc.load(x, out=nc.ring(2, x.shape).next()).free()

    assert "stands in a ring" in refused(ring_freed)
    assert re.search(r"used after it is gone: freed in line \d+ of freed, `tile.free\(\)`", refused(freed))
    assert "its place in a ring of 2 went to the next tile" in refused(stale)


def test_dtypes_and_shapes() -> None:
    def mixed(nc, x):
        tile = nc.load(x)
        return nc.matmul(nc.copy(tile[:, :128], dtype=BF16), tile)

    def wide_operand(nc, x):
        tile = nc.load(x)
        return nc.tensor_scalar(tile, "add", tile)

    assert "one dtype, not bf16 and fp32" in refused(mixed)
    assert "a tile of shape (128, 1)" in refused(wide_operand)
    assert "dtype torch.float64 is not supported" in refused(lambda nc, x: nc.sbuf((1, 1), torch.float64))
    assert "both tiles need one shape" in refused(
        lambda nc, x: nc.tensor_tensor(nc.load(x), nc.load(x[:, :8]), "add")
    )
    assert "operator 'power' is unknown; choose from add" in refused(
        lambda nc, x: nc.tensor_scalar(nc.load(x), "power", 2)
    )
    with pytest.raises(ValueError, match=r"input 0 has dtype torch\.int64"):
        run(lambda nc, x: x, torch.ones(4, 4, dtype=torch.int64))


def test_nothing_becomes_an_integer_by_the_way() -> None:
    labels = torch.ones(128, 4, dtype=torch.int32)
    said = "rounding to integers is not imitated"
    assert said in refused(lambda nc, x: nc.tensor_scalar(nc.load(x), "multiply", 0.5), labels)
    assert said in refused(lambda nc, x: nc.copy(nc.load(x), dtype=torch.int32))
    assert said in refused(lambda nc, x: nc.load(x, dtype=torch.int32))
    assert said in refused(lambda nc, x: nc.memset(nc.sbuf((1, 1), torch.int32), 0.5))

    def counted(nc, x):
        y = nc.hbm(x.shape)
        tile = nc.tensor_scalar(nc.load(x), "multiply", 0.5, dtype=torch.float32)
        nc.store(y, tile)
        return y

    assert torch.equal(run(counted, labels).output, labels * 0.5)


def test_a_full_sbuf_says_when_a_loop_holds_two() -> None:
    def kernel(nc, x):
        for _ in range(2):
            big = nc.sbuf((128, 30_000))
        return big

    assert refused(kernel).endswith("free big before, or use a ring.")


def test_slices_stay_inside_and_keep_the_partitions() -> None:
    assert "the partition dimension of" in refused(lambda nc, x: nc.load(x)[0])
    assert "slice 0:600 does not lie in a dimension of 512" in refused(lambda nc, x: nc.load(x)[:, 0:600])
    assert "slice 0:200 does not lie" in refused(lambda nc, x: nc.load(x[0:200]))
    assert "numbers, slices and None" in refused(lambda nc, x: nc.load(x[torch.arange(4)]))
    assert "numbers, slices and None" in refused(lambda nc, x: nc.load(x[..., 0]))
    assert "64 partitions begin at partition 0, 64, not at 32" in refused(
        lambda nc, x: nc.reduce("add", nc.load(x)[32:96])
    )


def test_inputs_are_only_read_and_outputs_are_complete() -> None:
    def half(nc, x):
        y = nc.hbm(x.shape)
        nc.store(y[:64], nc.load(x[:64]))
        return y

    assert "is an input, which kernels only read" in refused(lambda nc, x: nc.store(x, nc.load(x)))
    with pytest.raises(ValueError, match="32,768 elements were never stored"):
        run(half, X)
    with pytest.raises(ValueError, match=r"a kernel returns what it made with nc\.hbm"):
        run(lambda nc, x: None, X)
    with pytest.raises(ValueError, match="choose from v2, v3"):
        run(half, X, core="v9")


def test_tiles_and_tensors_of_another_run() -> None:
    kept = []

    def keep(nc, x):
        y, tile = nc.hbm(x.shape), nc.load(x)
        kept.extend([tile, y])
        nc.store(y, tile)
        return y

    run(keep, X)
    assert "belongs to another run" in refused(lambda nc, x: nc.reduce("add", kept[0]))
    assert "belongs to another run" in refused(lambda nc, x: nc.load(kept[1]))
    assert "is in HBM, which only load and store reach" in refused(lambda nc, x: nc.reduce("add", x))


def test_an_affine_range_is_held_to_its_promise() -> None:
    def running_sum(nc, x, loop):
        y, total = nc.hbm((128, 1)), nc.memset(nc.sbuf((128, 1)), 0.0)
        for i in getattr(nc, loop)(4):
            part = nc.reduce("add", nc.load(x[:, 128 * i : 128 * i + 128]))
            nc.tensor_tensor(total, part, "add", out=total)
        nc.store(y, total)
        return y

    def through_hbm(nc, x):
        y = nc.hbm((128, 1))
        for _ in nc.affine_range(2):
            nc.load(y)
            nc.store(y, nc.load(x[:, :1]))
        return y

    assert "part of it was never stored" in refused(through_hbm)
    assert "a whole number of turns, not 4.0" in refused(lambda nc, x: list(nc.affine_range(512 / 128)))
    with pytest.raises(KernelError, match="use sequential_range"):
        run(through_hbm, X, dry=True)
    with pytest.raises(KernelError, match="use sequential_range"):
        run(running_sum, X, loop="affine_range")
    assert torch.equal(run(running_sum, X, loop="sequential_range").output, X.sum(dim=1, keepdim=True))


def test_bytes_are_counted_without_values() -> None:
    def kernel(nc, x, labels):
        y = nc.hbm(x.shape, x.dtype)
        nc.load(labels)
        nc.store(y, nc.load(x))
        return y

    assert hbm_bytes(kernel, [(128, 64), ((128, 1), torch.int32)]) == 2 * 128 * 64 * 2 + 128 * 4
