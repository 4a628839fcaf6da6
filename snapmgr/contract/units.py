"""Parses and formats sizes and durations."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

# Texts, compiled at their first use: at each start they would take longer than many a module. "a" is for ASCII: "\d"
# would take Arabic digits, and without regard to case the Kelvin sign would be a K.
_SIZE = r"(?ai)(?P<number>\d{1,30}(?:\.\d{1,30})?)\s*(?:(?P<unit>[KMGTPE])i?)?B?"
_PERCENT = r"(?a)\d{1,3}(?:\.\d{1,6})?"
_KIB = 1024
_POWERS = {unit: power for power, unit in enumerate("KMGTPE", start=1)}
# The limit of the kernel, of file sizes and of SQL's BIGINT UNSIGNED.
_SIZE_LIMIT = 2**64
_DURATION_PART = r"(?a)(?P<number>\d{1,30}(?:\.\d{1,30})?) *(?P<unit>ms|s|min|m|h|d|w|y) *"
_MILLISECONDS = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
    "y": 365 * 86_400_000,
}
# Numbers in this range are written out, others as powers of ten.
_PLAIN = (1e-9, 1e15)
_LONG_SCALES = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
# datetime ends at the year 9999.
_DURATION_LIMIT_S = 9999 * 365 * 86400


def _exact(number: str) -> int | Fraction:
    """Return the value of decimal digits with or without a point."""
    if number.isdecimal():
        return int(number)
    from fractions import Fraction  # noqa: PLC0415 - it brings decimal with it, and few numbers have a point

    return Fraction(number)


def parse_size(text: str) -> int:
    """Given "512", "64K", "1.5G", "10MB" or "2 GiB", return bytes; a unit is always a power of 1024.

    Raises ValueError for anything else, also for a fraction of a byte and for more than 16 EiB.
    """
    match = re.fullmatch(_SIZE, text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and K, M, G, T, P or E, as in 512M or 1.5G")
    unit = match["unit"]
    # Exact: a float would change "9007199254740993".
    size = _exact(match["number"]) * (_KIB ** _POWERS[unit.upper()] if unit else 1)
    if unit is None and size.denominator != 1:
        raise ValueError(f"{text!r} is not a size: bytes have no fractions")
    if size > _SIZE_LIMIT:
        raise ValueError(f"{text!r} is too large: the maximum is 16E")
    return int(size)


def part_of(text: str, whole_bytes: int) -> int:
    """Given "5%", "10G" or "0", return bytes; a share is one of `whole_bytes`. Raises ValueError for anything else."""
    number = text.strip().removesuffix("%")
    if number != text.strip():
        if re.fullmatch(_PERCENT, number) and float(number) < 100:  # noqa: PLR2004 - all of it is never free
            return int(_exact(number) * whole_bytes // 100)
        raise ValueError(f'{text!r} is not a share: write "5%"; it must be below 100')
    if number.isdecimal() and number.strip("0"):
        # A few bytes instead of an intended share.
        raise ValueError(f'{text!r} has no unit: write "{number}%" for a share, or "{number}G"')
    return parse_size(text)


def format_size(size_bytes: int) -> str:
    """Given bytes, return "0 B", "512 B", "1.5 GiB": at most one decimal, binary units."""
    sign = "-" if size_bytes < 0 else ""
    if abs(size_bytes) < _KIB:
        return f"{size_bytes} B"
    value = abs(size_bytes) / _KIB
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.95 would be printed as 1024.0, so it belongs to the next unit.
        if round(value, 1) < _KIB:
            return f"{sign}{value:.1f} {unit}"
        value /= _KIB
    return f"{sign}{value:.1f} EiB"


def parse_duration(text: str) -> float:
    """Given "250ms", "30s", "5m", "1h30m", "2 d 3 h" or "0", return seconds; larger units come first.

    A number without a unit is refused, except 0. "m" is minutes; a year has 365 days.
    Raises ValueError for anything else and for more than 9999 years.
    """
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    total: int | Fraction = 0
    units: list[int] = []
    position = 0
    while match := re.compile(_DURATION_PART).match(stripped, position):
        units.append(_MILLISECONDS[match["unit"]])
        total += _exact(match["number"]) * units[-1]
        position = match.end()
    if position < len(stripped) or not units or any(small >= large for large, small in pairwise(units)):
        raise ValueError(
            f"{text!r} is not a duration: write a number and ms, s, m, h, d, w or y, as in 250ms, 30s or 1h30m"
        )
    if total > 1000 * _DURATION_LIMIT_S:
        raise ValueError(f"{text!r} is too long: the maximum is 9999y")
    return float(total / 1000)


def format_duration(seconds: float) -> str:
    """Given seconds, return "0.8 ms", "31 ms", "2.5 s", "3 min 20 s", "5 h 40 min" or "2 d 3 h": two units at most."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    # Each limit is where rounding gives the next form: 9.95 ms is "10 ms", 59.95 s is "1 min".
    if round(seconds * 1000, 1) < 10:  # noqa: PLR2004
        return f"{seconds * 1000:.1f} ms"
    if round(seconds * 1000, 0) < 1000:  # noqa: PLR2004
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    return _format_long(round(seconds)) if math.isfinite(seconds) else "forever"


def _format_long(seconds: int) -> str:
    size, unit, small, small_unit = next(scale for scale in _LONG_SCALES if seconds >= scale[0])
    rest = seconds % size // small
    return f"{seconds // size} {unit} {rest} {small_unit}" if rest else f"{seconds // size} {unit}"


def format_quantity(value: float, unit: str) -> str:
    """Given a measured figure and its SI unit without a prefix, return it with three significant digits.

    "83.1 µs", "1.24 s", "3 min 20 s", "1.5 GiB", "94.2 MiB/s", "7,530/s", "62,515", "5.32e+58"; any other unit follows
    the number.
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "−∞" if value < 0 else "∞"
    if unit == "s":
        return _format_seconds(value)
    if unit in {"B", "B/s"}:
        return format_size(round(value)) + unit[1:]
    text = _three_digits(value)
    return f"{text}/s" if unit == "1/s" else f"{text} {unit}".rstrip()


def _format_seconds(seconds: float) -> str:
    if abs(seconds) >= 120:  # noqa: PLR2004 - tenths do not matter from two minutes on
        return format_duration(seconds)
    # The limits are where three digits round up into the next unit.
    unit, factor = next(
        ((unit, factor) for unit, factor, most in (("µs", 1e6, 0.9995e-3), ("ms", 1e3, 0.9995)) if abs(seconds) < most),
        ("s", 1.0),
    )
    return f"{_three_digits(seconds * factor)} {unit}" if seconds else "0 s"


def _three_digits(value: float) -> str:
    if value and not _PLAIN[0] <= abs(value) < _PLAIN[1]:
        return f"{value:.2e}"
    if value == round(value) or abs(value) >= 99.95:  # noqa: PLR2004 - no significant digit is lost without decimals
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-12))
    # 9.996 rounds to 10.00: one digit too many.
    text = f"{value:,.{decimals}f}"
    return text if len(text.replace(".", "").replace("-", "").lstrip("0")) <= 3 else f"{value:,.{decimals - 1}f}"  # noqa: PLR2004
