"""Figures and panels: units required, the same bytes each time, numbers as text."""

from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmlab.lab import LiveCurve, Panel, caption, figure, overlap_panel, ticker
from fmlab.lab.figures import png
from fmlab.lab.overlap import Overlap
from fmlab.lab.panels import choices, slider


def _line(x: str = "step [steps]", y: str = "loss [nats/token]"):
    fig, ax = figure(x=x, y=y)
    ax.plot([1, 2, 3], [3.0, 2.5, 2.26], label="train")
    return fig


def test_the_text_carries_the_numbers() -> None:
    text = repr(caption(_line(), kind="measured", text="It falls."))
    assert text.splitlines() == [
        "Figure (measured): It falls.",
        "loss [nats/token] against step [steps]",
        "  train: (1, 3), (2, 2.50), (3, 2.26)",
    ]
    assert "2.26" not in repr(caption(_line(), kind="measured", text="It falls.", noisy=True))


def test_missing_labels_and_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="'loss' has no unit"):
        caption(_line(y="loss"), kind="measured", text="x")
    with pytest.raises(ValueError, match="the x axis has no label"):
        caption(_line(x=""), kind="measured", text="x")
    with pytest.raises(ValueError, match="needs source="):
        caption(_line(), kind="quoted", text="x")
    with pytest.raises(ValueError, match="text is empty"):
        caption(_line(), kind="measured", text=" ")


def test_an_axis_of_names_needs_no_unit_but_a_log_axis_does() -> None:
    fig, ax = figure(x="chip", y="memory [GB]")
    ax.bar(["cpu", "gpu"], [24, 80])
    assert "bars: 24, 80" in repr(caption(fig, kind="given", text="Memory.")).replace("24.0", "24").replace(
        "80.0", "80"
    )
    fig, ax = figure(x="size", y="time [ms]")
    ax.loglog([1, 100], [1, 100])
    with pytest.raises(ValueError, match="'size' has no unit"):
        caption(fig, kind="measured", text="x")


def test_pictures_have_the_same_bytes_and_say_what_they_show() -> None:
    assert png(_line(), "a") == png(_line(), "a")
    image = pytest.importorskip("PIL.Image")
    picture = image.open(BytesIO(png(_line(), "naïve → less")))
    assert (picture.mode, picture.info["Description"]) == (
        "P",
        "naïve → less",
    )  # a palette: a third of the bytes
    data, metadata = caption(_line(), kind="measured", text="It falls.", alt="a falling line").bundle()
    assert set(data) == {"image/png", "text/plain"}
    assert metadata["image/png"]["alt"] == "a falling line"


def _ticks(low: float, high: float, base: float) -> set[str]:
    fig, ax = figure(x="n [ranks]", y="time [ms]")
    ax.plot([low, high], [1, 2])
    ax.set_xscale("log", base=base)
    png(fig)
    axis = ax.xaxis
    texts = [tick.label1.get_text() for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]]
    return set(texts) - {""}


def test_ticks_of_a_log_axis_are_plain_numbers_while_these_are_short() -> None:
    assert {"20", "30", "60", "100"} <= _ticks(18, 150, 10), "not 6x10^1"
    assert {"64", "1,024"} <= _ticks(2, 1024, 2), "not 2^6"
    assert "0.001" in _ticks(1e-3, 1e2, 10)
    assert any("10^{12}" in text for text in _ticks(1e6, 1e12, 10))


def test_labels_of_major_and_minor_ticks_of_a_log_axis_are_level() -> None:
    fig, ax = figure(x="n [ranks]", y="time [ms]")
    ax.plot([18, 150], [1, 2])
    ax.set_xscale("log")
    png(fig)
    ticks = [*ax.xaxis.get_major_ticks(), *ax.xaxis.get_minor_ticks()]
    assert len({round(tick.get_pad() + tick._size, 6) for tick in ticks}) == 1


def test_a_live_curve_without_a_person_is_one_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveCurve("The loss falls.") as curve:
        for step in range(20):
            curve.add(step, train=3 - step / 10, validation=3.1)
    text = repr(curve.figure())
    assert "train: 20 points, first (0, 3), last (19, 1.1)" in text
    assert "validation: 20 points" in text
    shown = capsys.readouterr().out
    curve.close()
    assert "Figure (measured): The loss falls." in shown
    assert capsys.readouterr().out == "", "it is drawn once"


def test_a_ticker_counts_where_a_person_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = ticker(2, "training")
    quiet(1, None)
    assert capsys.readouterr() == ("", ""), "a headless run stays as it is"
    monkeypatch.setattr("fmlab.lab.live.is_live", lambda: True)
    tick = ticker(2, "training")
    tick(1, None)
    tick()
    shown = capsys.readouterr()
    assert "training" in shown.out + shown.err
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        ticker(0)


def _panel(**changes: object) -> Panel:
    def draw(n: int, mode: str) -> tuple:
        fig, ax = figure(x="n [ranks]", y="bytes [B]")
        ax.plot([0, n], [0, n])
        return fig, f"{mode}: {n} B"

    settings = {
        "n": slider(4, 1, 8, "ranks"),
        "mode": choices("ring", ("ring", "tree"), "algorithm"),
        **changes,
    }
    return Panel("How many bytes?", draw, kind="modelled", **settings)


def test_a_panel_is_a_picture_and_a_line() -> None:
    panel = _panel()
    data, metadata = panel.bundle()
    assert set(data) == {"image/png", "text/plain"}
    assert data["text/plain"] == "How many bytes? (modelled)\nring: 4 B"
    assert metadata["image/png"]["alt"] == "How many bytes? ring: 4 B"
    before = panel.picture
    panel.set(n=8, mode="tree")
    assert panel.summary == "tree: 8 B"
    assert panel.picture != before


def test_the_live_panel_follows_its_sliders() -> None:
    panel = _panel()
    _, ranks, algorithm, picture, line = panel.widget().children
    before = picture.value
    ranks.value = 7
    assert picture.value != before
    assert 'alt="How many bytes? ring: 7 B"' in picture.value
    assert "ring: 7 B" in line.value
    assert (ranks.description, algorithm.description) == ("ranks", "algorithm")


def test_sliders_have_room_for_the_longest_value_and_are_equally_wide() -> None:
    def widths(value: str) -> list[str]:
        _, *sliders, _, _ = _panel(mode=choices("ring", ("ring", value), "algorithm")).widget().children
        return [slider.layout.width for slider in sliders]

    assert widths("tree") == ["36em", "36em"]
    assert widths("t" * 20) == ["42em", "42em"]


def test_a_panel_refuses_what_it_cannot_show() -> None:
    with pytest.raises(ValueError, match="none of the options"):
        slider(9, 1, 8, "ranks")
    with pytest.raises(ValueError, match=r"n = 9; legal are: \(1, 2"):
        _panel().set(n=9)
    with pytest.raises(ValueError, match="no control 'm'; controls are: n, mode"):
        _panel().set(m=1)
    with pytest.raises(ValueError, match=r"n = 9; legal are: \(1, 2\)"):
        _panel(n=choices(9, lambda **others: (1, 2), "ranks"))


@given(
    ranks=st.integers(1, 300),
    buckets=st.integers(1, 70),
    tokens=st.integers(1, 100_000),
    link=st.floats(1e8, 1e12),
)
def test_overlap_is_between_nothing_and_everything(
    ranks: int, buckets: int, tokens: int, link: float
) -> None:
    step = Overlap(124e6, tokens, ranks, buckets, 1e14, link)
    assert -1e-9 <= step.hidden <= 1
    starts_and_ends = [moment for span in step.spans for moment in span]
    assert starts_and_ends == sorted(starts_and_ends)
    if buckets == 1 and ranks > 1:
        assert step.hidden == pytest.approx(0, abs=1e-6)
    if ranks == 1:
        assert step.waiting == pytest.approx(0)


def test_overlap_panel_by_hand() -> None:
    # 124M fp32 gradients are 496 MB; a ring over 8 ranks sends 868 MB: 34.72 ms at 25 GB/s,
    # and 8 buckets x 14 messages of 20 us
    panel = overlap_panel()
    assert "backward 40.6 ms, on the wire 37.0 ms" in panel.summary
