"""The report's charts: where things are drawn."""

from __future__ import annotations

import itertools
import random
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.drawing.bars import Bar, Bars, bar_chart
from snapmgr.drawing.curves import Curve, curve_chart
from snapmgr.drawing.intervals import Lane, interval_chart, stalls
from snapmgr.drawing.layoutmap import layout_map, window_of
from snapmgr.drawing.ratios import RatioGroup, RatioRow, ratio_chart
from snapmgr.drawing.svg import NARROW, WIDE, Scale, cut, linear_ticks, log_ticks, tick_words

NAMES = {"title": "A <title>", "description": "What & how", "ident": "a+b/c"}


def parsed(svg):
    return ET.fromstring(svg)  # noqa: S314 - our own


def kinds(svg, kind):
    return [one for one in parsed(svg).iter() if (one.get("class") or "").split()[:1] == [kind]]


def row(value, low, high, kind="same"):
    return RatioRow(label="btrfs ÷ ext4", value=value, low=low, high=high, text=f"{value}", kind=kind)


@given(st.floats(-1e6, 1e6), st.floats(0.01, 1e9))
def test_linear_ticks_are_few_round_and_within(low, span):
    ticks = linear_ticks(low, low + span)
    assert len(ticks) <= 7
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in ticks)


@given(st.floats(1e-6, 1e6), st.floats(2.1, 1e8))
def test_log_ticks_are_few_and_within(low, span):
    ticks = log_ticks(low, low * span)
    assert 1 <= len(ticks) <= 13
    assert all(low * 0.998 <= tick <= low * span * 1.002 for tick in ticks)
    assert ticks == sorted(ticks)


def test_ticks_of_bytes_are_round_in_their_unit():
    scale = Scale(low=0, high=500 * 2**20, start=0, end=100, binary=True)
    assert scale.ticks() == [number * 100 * 2**20 for number in range(6)]


def test_a_scale_maps_its_ends_and_keeps_what_is_beyond_at_the_edge():
    scale = Scale(low=0.5, high=2, start=100, end=300, logarithmic=True)
    assert [scale(value) for value in (0.5, 1, 2, 9, 0.1)] == pytest.approx([100, 200, 300, 300, 100])
    assert Scale(low=1, high=1, start=0, end=10)(1) == 5


@pytest.mark.parametrize(("value", "words"), [(0.25, "0.25"), (1, "1"), (512, "512"), (20_000, "20k"), (5e6, "5M")])
def test_ticks_have_short_words(value, words):
    assert tick_words(value) == words


def test_long_labels_are_cut():
    assert cut("short", 100) == "short"
    assert cut("x" * 100, 72) == "x" * 9 + "…"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_ratio_stands_where_its_value_is(width):
    group = RatioGroup(title="Update", better="less", rows=[row(1.0, 0.9, 1.1), row(2.0, 1.8, 2.2, "worse")])
    svg = ratio_chart([group], width=width, **NAMES)
    (one,) = kinds(svg, "one")
    first, second = (float(point.get("cx")) for point in kinds(svg, "point"))
    assert first == pytest.approx(float(one.get("x1")), abs=0.11)
    assert second > first
    assert parsed(svg).get("aria-labelledby") == f"a-b-c-{width}-t"
    assert "noise" not in svg


def test_the_noise_is_a_band_about_1():
    group = RatioGroup(title="Update", better="more", rows=[row(1.5, 1.2, 1.8, "better")], noise=1.25)
    svg = ratio_chart([group], width=WIDE, **NAMES)
    (band,) = kinds(svg, "noise")
    one = float(kinds(svg, "one")[0].get("x1"))
    left, width = float(band.get("x")), float(band.get("width"))
    assert left < one < left + width
    assert one - left == pytest.approx(left + width - one, abs=0.2)


def test_a_long_title_takes_several_lines_and_loses_no_word():
    words = "Snapshot call while files are being written, with 10 snapshots (median)"
    group = RatioGroup(title=words, better="less", rows=[row(1.0, 0.9, 1.1)])
    narrow, wide = (ratio_chart([group], width=width, **NAMES) for width in (NARROW, WIDE))
    assert " ".join(one.text for one in kinds(narrow, "head")) == words
    assert [one.text for one in kinds(wide, "head")] == [words]
    lowest = max(float(one.get("y")) for one in kinds(narrow, "head"))
    assert lowest < float(kinds(narrow, "point")[0].get("cy"))


def test_what_goes_on_beyond_the_edge_has_an_arrow():
    rows = [row(1.0, 0.0, 1e9), row(1.0, 0.9, 1.1)]
    svg = ratio_chart([RatioGroup(title="Update", better="less", rows=rows)], width=WIDE, **NAMES)
    endless, bounded = (one.get("d") for one in kinds(svg, "interval"))
    assert endless.count("L") == 4
    assert bounded.count("L") == 0
    assert bounded.count("v8") == 2


def test_nothing_to_draw_is_nothing():
    assert ratio_chart([], width=WIDE, **NAMES) == ""
    assert bar_chart([], unit="s", width=WIDE, **NAMES) == ""
    assert curve_chart([], x_title="x", unit="s", width=NARROW, **NAMES) == ""
    assert interval_chart([], interval_s=1, width=WIDE, **NAMES) == ""
    assert window_of([[]]) == (0, 1)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_bars_are_as_long_as_their_values(width):
    bars = [Bar(value=2.0, dots=(1.5, 2.5)), Bar(value=4.0, text="2.00", kind="worse"), Bar(value=0.0)]
    svg = bar_chart([Bars(label="btrfs", bars=bars)], unit="s", width=width, **NAMES)
    first, second, third = (float(one.get("width")) for one in kinds(svg, "bar"))
    assert second == pytest.approx(2 * first, abs=0.2)
    assert third == 1.5
    assert [one.text for one in kinds(svg, "value")] == (["2.00"] if width == WIDE else [])


def test_curves_are_logarithmic_where_that_shows_more():
    def upwards(values):
        points = list(zip((1, 2, 4, 8), values, strict=True))
        curve = Curve(label="btrfs", colour=3, points=points, low=values, high=values)
        (line,) = kinds(curve_chart([curve], x_title="threads", unit="s", width=NARROW, **NAMES), "curve")
        return [tuple(map(float, step)) for step in re.findall(r"([\d.]+) ([\d.]+)", line.get("d"))]

    steep = upwards([1.0, 10.0, 100.0, 1000.0])
    rises = [before[1] - after[1] for before, after in itertools.pairwise(steep)]
    assert max(rises) - min(rises) < 0.3
    flat = upwards([1.0, 2.0, 3.0, 4.0])
    assert flat[0][1] > flat[-1][1]
    steps = [after[0] - before[0] for before, after in itertools.pairwise(flat)]
    assert max(steps) - min(steps) < 0.3


def test_curves_of_zeros_are_drawn():
    curve = Curve(label="btrfs", colour=12, points=[(1, 0.0), (2, 0.0)], low=[0.0, 0.0], high=[0.0, 0.0])
    assert parsed(curve_chart([curve], x_title="x", unit="", width=NARROW, **NAMES)) is not None


@pytest.mark.parametrize(
    ("values", "spans"),
    [
        ([1, 0, 0, 2, 0], [(1, 3), (4, 5)]),
        ([0, 0, 5], [(0, 2)]),
        ([1, 2], []),
        # What never moved is no load that stalls.
        ([0, 0, 0], []),
        ([], []),
    ],
)
def test_stalls_are_spans_without_anything(values, spans):
    assert stalls(values) == spans


def test_stalls_are_shaded_where_they_are_and_the_snapshot_parts_the_run():
    lane = Lane(title="Files read", unit="", before=[1.0] * 5, after=[1.0, 0.0, 0.0, 1.0, 1.0], colour=0)
    svg = interval_chart([lane], interval_s=10, width=WIDE, **NAMES)
    (stall,) = kinds(svg, "stall")
    (snapshot,) = kinds(svg, "snapshot")
    step = (WIDE - 16) / 10
    assert float(stall.get("x")) == pytest.approx(8 + 6 * step, abs=0.1)
    assert float(stall.get("width")) == pytest.approx(2 * step, abs=0.1)
    assert float(snapshot.get("x1")) == pytest.approx(8 + 5 * step, abs=0.1)


def test_a_thousand_intervals_are_few_columns_and_every_stall():
    rng = random.Random(1)
    values = [float(rng.random() > 0.01) for _ in range(1000)]
    lane = Lane(title="Files read", unit="", before=values, after=(), colour=0)
    svg = interval_chart([lane], interval_s=1, width=NARROW, **NAMES)
    assert len(kinds(svg, "stall")) == len(stalls(values)) > 3
    assert kinds(svg, "columns")[0].get("d").count("M") == 200
    assert not kinds(svg, "snapshot")


def test_a_file_in_one_piece_is_one_rising_line_and_a_scattered_one_is_not():
    def rows(extents):
        svg = layout_map(extents, window=(0, 1 << 30), size_bytes=1 << 30, **NAMES)
        (path,) = kinds(svg, "extent")
        return [(int(x), int(y)) for x, y in re.findall(r"M(\d+) (\d+)h", path.get("d"))]

    whole = sorted(rows([(0, 0, 1 << 30)]))
    assert all(after[1] <= before[1] for before, after in itertools.pairwise(whole))
    assert whole[0][1] - whole[-1][1] > 170
    rng = random.Random(1)
    size = 1 << 19
    scattered = rows([(number * size, rng.randrange(1 << 30), size) for number in range(2000)])
    assert len(scattered) > 1000
    assert len({y for _, y in scattered}) > 150


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(1, 2**40)), max_size=20))
def test_maps_of_anything_stay_in_their_picture(extents):
    svg = layout_map(extents, window=window_of([extents]), size_bytes=2**62, **NAMES)
    (path,) = kinds(svg, "extent")
    for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d") or ""):
        assert 8 <= int(x) <= int(x) + int(length) <= 8 + 284
        assert 6 <= int(y) < 190
