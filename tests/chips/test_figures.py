"""The chips' figures: complete, dense, consistent with each other, and refused where no source gives one."""

import re

import pytest
import torch

from fmlab.chips import Chip, Figure, Roofline, chip, chips, host, hosts
from fmlab.chips.catalogue import read_table

EVERY = [(name, key, figure) for name in chips() for key, figure in chip(name).figures().items()]
# The chip's rate is more than its cores' together, and both are what the maker's documents say.
CORES_AND_CHIP_DISAGREE = {
    ("trn1", "peak.bf16"): (184, 190),
    ("trn1", "peak.fp16"): (184, 190),
    ("trn1", "peak.fp8"): (184, 190),
    ("trn1", "peak.fp32"): (46, 47.5),
    ("trn2", "peak.bf16"): (632, 667),
    ("trn2", "peak.fp8"): (1264, 1299),
    ("trn2", "peak.fp32"): (160, 181),
    ("trn3", "peak.bf16"): (632, 671),
    ("trn3", "peak.fp8"): (2520, 2517),
    ("trn3", "peak.fp32"): (160, 183),
}


def test_the_chips_that_the_lessons_need_are_there() -> None:
    wanted = "v100-16gb v100-32gb a100-40gb a100-80gb h100 h200 b200 gb200 mi300x mi355x gaudi2 gaudi3 inf2"
    wanted += (
        " tpu-v3 tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-v7 trn1 trn2 trn3 trn1-core trn2-core trn3-core trn2-lnc2"
    )
    assert set(wanted.split()) <= set(chips())


@pytest.mark.parametrize(("name", "key", "figure"), EVERY, ids=[f"{name}:{key}" for name, key, _ in EVERY])
def test_each_figure_says_what_it_counts(name: str, key: str, figure: Figure) -> None:
    unit = chip(name).unit
    for one in (figure, *figure.also):
        assert one.source
        if key.startswith("peak."):
            assert one.convention.startswith("dense, per "), one.convention
            assert f"per {unit}" in one.convention or "per GPU" in one.convention
        if key.startswith("sparse."):
            assert "not dense" in one.convention
        if key.startswith(("link_bandwidth", "per_link")):
            assert one.convention.startswith("one way")
        if key.startswith("achievable."):
            assert "measured by the source" in one.convention


@pytest.mark.parametrize("name", chips())
def test_rates_memory_and_bandwidth_are_plausible(name: str) -> None:
    one = chip(name)
    assert {"memory", "memory_bandwidth"} <= set(one.figures())
    assert one.dtypes
    assert 10e9 < one.memory_bytes < 400e9
    for dtype in one.dtypes:
        assert 1e13 < one.peak_flops(dtype) < 2e16
        assert 9 < one.roofline(dtype).ridge < 2000
        measured = one.achievable_flops(dtype)
        assert measured is None or 0.5 < measured / one.peak_flops(dtype) < 1
    for low, high in (("fp32", "bf16"), ("bf16", "fp8"), ("fp8", "fp4")):
        if {low, high} <= set(one.dtypes):
            assert one.peak_flops(low) <= one.peak_flops(high)


@pytest.mark.parametrize("name", [name for name in chips() if chip(name).unit == "core"])
def test_cores_add_up_to_their_chip_or_the_difference_is_known(name: str) -> None:
    core = chip(name)
    assert core.of is not None
    whole = chip(core.of)
    assert whole.cores is not None
    assert core.cores is not None
    count = whole.cores // core.cores  # a logical core is several
    assert core.memory_bytes * count == whole.memory_bytes
    assert core.memory_bandwidth * count == pytest.approx(whole.memory_bandwidth)
    if "on_chip" in core.figures():
        assert core.on_chip_bytes * count == whole.on_chip_bytes
    for dtype in core.dtypes:
        key = f"peak.{dtype}"
        together, published = core.figure(key).value * count, whole.figure(key).value
        known = CORES_AND_CHIP_DISAGREE.get((whole.name, key), (together, together))
        assert (together, published) == known


@pytest.mark.parametrize("name", [name for name in chips() if "sparse.bf16" in chip(name).figures()])
def test_a_sparse_rate_is_never_the_peak(name: str) -> None:
    one = chip(name)
    assert one.figure("sparse.bf16").base > 1.9 * one.peak_flops("bf16")


@pytest.mark.parametrize("name", [name for name in chips() if "per_link" in chip(name).figures()])
def test_a_chips_links_add_up(name: str) -> None:
    one = chip(name)
    ports = one.figure("link_bandwidth").base / one.figure("per_link").base
    assert ports == pytest.approx(round(ports)) or name == "trn2"  # 4 links of 128 and 2 of 64
    assert ports in (2, 4, 5, 6, 7, 12, 18)


def test_figures_from_the_literature_by_hand() -> None:
    assert chip("h100").peak_flops("bf16") == 989e12
    assert chip("h100").achievable_flops("bf16") == 794.5e12
    assert chip("h100").memory_bandwidth == 3.35e12
    assert chip("h100").link_bandwidth == 450e9  # 900 GB/s is both ways together
    assert chip("trn1").memory_bandwidth == 820 * 2**30
    assert chip("trn2").on_chip_bytes == 224 * 2**20
    assert chip("trn2").link_bandwidth == 640e9
    assert chip("trn2-core").peak_flops("bf16") == 79e12
    assert chip("v100-32gb").peak_flops("fp16") == 125e12
    assert chip("a100-40gb").memory_bytes == 40 * 2**30
    assert [chip(name).compiler for name in ("h100", "tpu-v5e", "trn2")] == ["eager"] + ["static-shape"] * 2
    assert "96 GiB" in str(chip("trn2").figure("memory"))


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_a_dtype_goes_by_any_of_its_names(dtype: object) -> None:
    assert chip("a100-80gb").peak_flops(dtype) == 312e12


def test_what_no_source_gives_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16.*v100-16gb.*fp16, fp32"):
        chip("v100-16gb").peak_flops("bf16")
    with pytest.raises(ValueError, match=r"fp32.*tpu-v5p.*bf16"):
        chip("tpu-v5p").peak_flops(torch.float32)
    with pytest.raises(ValueError, match="fp8"):
        chip("a100-40gb").roofline("fp8")
    with pytest.raises(ValueError, match=r"measured.*achievable=False"):
        chip("trn2").roofline("bf16", achievable=True)
    with pytest.raises(ValueError, match=r"on_chip.*tpu-v4"):
        _ = chip("tpu-v4").on_chip_bytes
    assert chip("trn2").achievable_flops("bf16") is None


def test_an_unknown_chip_lists_the_known_and_the_closest() -> None:
    with pytest.raises(ValueError, match=r"'a100'.*mi300x.*did you mean 'a100-40gb' or 'a100-80gb'"):
        chip("a100")
    with pytest.raises(ValueError, match=r"did you mean 'trn2'"):
        chip("Trainium2")


def test_a_figure_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown unit 'TFLOPS'"):
        Figure(1, "TFLOPS", "dense", "somewhere")
    with pytest.raises(ValueError, match="no source"):
        Figure(1, "GB", "per chip", " ")
    with pytest.raises(ValueError, match="above 0"):
        Figure(0, "GB", "per chip", "somewhere")


def test_the_roofline_by_hand() -> None:
    roof = Roofline(peak=100.0, bandwidth=10.0)
    assert roof.ridge == 10
    assert roof.attainable(4) == 40
    assert roof.attainable(40) == 100
    assert roof.seconds(flops=200, nbytes=50) == 5
    assert roof.bound(200, 50) == "memory"
    assert roof.bound(200, 20) == "compute"
    with pytest.raises(ValueError, match="not below 0"):
        roof.bound(-1, 1)
    with pytest.raises(ValueError, match="above 0"):
        Roofline(0, 1)


def test_a_measured_chip_is_a_chip() -> None:
    one = Chip.measured("here", {"float32": 1e11, "bf16": 4e11}, 2e10, 8 * 2**30, how="a test")
    assert one.dtypes == ["fp32", "bf16"]
    assert one.roofline("fp32").ridge == 5
    assert one.achievable_flops("bf16") == one.peak_flops("bf16") == 4e11
    assert all(figure.source == "a test" for figure in one.figures().values())
    with pytest.raises(ValueError, match="link_bandwidth"):
        _ = one.link_bandwidth
    with pytest.raises(ValueError, match="at least"):
        Chip.measured("here", {}, 2e10, 8 * 2**30)


def test_prices_are_dated_and_per_chip_figures_follow() -> None:
    prices = [price for name in hosts() for price in host(name).prices]
    assert len(prices) > 15
    for price in prices:
        assert re.fullmatch(r"20\d\d(-\d\d(-\d\d)?)?", price.date)
        assert price.source
        assert price.region
        assert price.kind in ("on-demand", "capacity block", "reserved, effective", "list")
    assert host("p5.48xlarge").usd_per_chip_hour() == pytest.approx(host("p5.4xlarge").usd_per_chip_hour())
    assert host("p5.48xlarge").usd_per_chip_hour("capacity block") == 39.33 / 8
    assert host("tpu-v5e-host").usd_per_chip_hour("list") == 1.20  # the price of a chip already
    with pytest.raises(ValueError, match=r"trn2.48xlarge.*none"):
        host("trn2.48xlarge").usd_per_chip_hour()


def test_every_source_is_used() -> None:
    named = set()
    for table in ("nvidia", "google", "aws", "amd", "intel", "hosts"):
        named |= set(re.findall(r"'source': '([^']+)'", str(read_table(table))))
        for many in re.findall(r"'source': \[([^]]+)\]", str(read_table(table))):
            named |= set(re.findall(r"'([^']+)'", many))
    assert named == set(read_table("sources"))
