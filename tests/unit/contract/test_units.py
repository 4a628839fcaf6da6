"""Sizes and durations: exact, unambiguous, and printed so that they can be read back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.units import (
    format_duration,
    format_quantity,
    format_size,
    parse_duration,
    parse_size,
    part_of,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("64K", 65536),
        ("64k", 65536),
        (" 2 GiB ", 2 * 1024**3),
        ("10MB", 10 * 1024**2),
        ("1.5G", 3 * 512 * 1024**2),
        ("16E", 2**64),
        # A float would make it ...992.
        ("9007199254740993", 9007199254740993),
        ("0.1K", 102),
    ],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    # The Kelvin sign folds to k, "٣" is a digit to Unicode; both once went through the pattern.
    [
        "",
        "K",
        "-1",
        "1.5",
        "1,5G",
        "1e3",
        "0x10",
        "5X",
        "5 GG",
        "512i",
        "1.G",
        ".5G",
        "nan",
        "16.1E",
        "9" * 400,
        "5\u212a",
        "٣",
    ],
)
def test_what_is_no_size_is_refused_with_the_text_itself(text):
    with pytest.raises(ValueError, match=r"is not a size|is too large") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(min_value=0, max_value=2**64))
def test_a_plain_number_is_read_exactly(size_bytes):
    assert parse_size(str(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=2**63))
def test_a_printed_size_reads_back_within_its_last_digit(size_bytes):
    again = parse_size(format_size(size_bytes))
    assert abs(again - size_bytes) <= max(0.05 * size_bytes, 0)
    if size_bytes < 1024:
        assert again == size_bytes


@given(st.integers(min_value=1, max_value=2**62))
def test_a_printed_size_has_at_most_four_digits_before_the_point(size_bytes):
    number = format_size(size_bytes).split()[0]
    assert float(number) < 1024
    assert format_size(-size_bytes) == "-" + format_size(size_bytes)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048524, "1023.9 KiB"),
        (1048575, "1.0 MiB"),
        (2**64, "16.0 EiB"),
    ],
)
def test_sizes_are_printed(size_bytes, text):
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("250ms", 0.25),
        ("30s", 30),
        ("5m", 300),
        ("5min", 300),
        ("1h30m", 5400),
        ("2 d 3 h", 183600),
        (" 1w ", 604800),
        ("1y", 365 * 86400),
        ("1.5h", 5400),
        ("1s 500ms", 1.5),
    ],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "30",
        "3 0s",
        "1m30",
        "5M",
        "-1s",
        "1s1s",
        "1m1h",
        "1e3s",
        "1 month",
        "5mins",
        "1h,5m",
        "nans",
        "infs",
        "٣s",
        "10000y",
        "9" * 400 + "s",
    ],
)
def test_what_is_no_duration_is_refused_with_the_text_itself(text):
    with pytest.raises(ValueError, match=r"is not a duration|is too long") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@given(st.floats(min_value=0, max_value=1e10))
def test_a_printed_duration_reads_back_within_its_smaller_unit(seconds):
    again = parse_duration(format_duration(seconds))
    # Two units at most: the smaller one is at worst 1/10 of a number below 10, or 1/24 of a day, 1/60 of an hour.
    assert math.isclose(again, seconds, rel_tol=0.06, abs_tol=0.00005)


@given(st.text(alphabet="0123456789. mshdwyin", max_size=12))
def test_any_text_is_read_or_refused_and_nothing_else(text):
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    assert 0 <= seconds < math.inf
    assert parse_duration(format_duration(seconds)) <= seconds * 1.06 + 0.0001


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 ms"),
        (0.0008, "0.8 ms"),
        (0.00994, "9.9 ms"),
        (0.00996, "10 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (3599.7, "1 h"),
        (20400, "5 h 40 min"),
        (183600, "2 d 3 h"),
        (-2.5, "-2.5 s"),
        (math.inf, "forever"),
    ],
)
def test_durations_are_printed(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (83.1234e-6, "s", "83.1 µs"),
        (9.996e-3, "s", "10.0 ms"),
        (0.99949, "s", "999 ms"),
        (0.9996, "s", "1.00 s"),
        (1.236, "s", "1.24 s"),
        (59.97, "s", "60.0 s"),
        (100.4, "s", "100 s"),
        (200.0, "s", "3 min 20 s"),
        (-0.0125, "s", "-12.5 ms"),
        (1.5 * 2**30, "B", "1.5 GiB"),
        (94.2 * 2**20, "B/s", "94.2 MiB/s"),
        (7530.4, "1/s", "7,530/s"),
        (7.5304, "1/s", "7.53/s"),
        (62515.0, "", "62,515"),
        (8.09, "", "8.09"),
        (0.05, "", "0.0500"),
        (12.0, "%", "12 %"),
        (5.315e58, "", "5.32e+58"),
        (2.55e-58, "", "2.55e-58"),
        (0.0, "", "0"),
        (math.nan, "s", "not a number"),
        (math.inf, "B", "∞"),
    ],
)
def test_measured_figures_are_written_with_three_digits(value, unit, text):
    assert format_quantity(value, unit) == text


@given(st.floats(min_value=1e-9, max_value=119.9), st.sampled_from(["s", "1/s", ""]))
def test_a_written_figure_is_near_the_measured_one(value, unit):
    text = format_quantity(value, unit).removesuffix("/s").replace(",", "")
    number, _, prefix = text.partition(" ")
    written = float(number) * {"µs": 1e-6, "ms": 1e-3}.get(prefix, 1.0)
    assert written == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(("text", "part"), [("5%", 50), ("0%", 0), ("0", 0), ("2.5%", 25), ("10K", 10240), ("0.1%", 1)])
def test_a_share_or_a_size(text, part):
    assert part_of(text, 1000) == part


@pytest.mark.parametrize("text", ["5", "100%", "-1%", "%", "all", "5 %", "5 %%", "1e3%"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(ValueError, match="share|size|unit"):
        part_of(text, 1000)
