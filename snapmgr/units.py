"""Bytes and durations: parsed and printed here and nowhere else."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGTPE]?)(?P<binary>i?)(?P<byte>B?)", re.IGNORECASE)
_POWERS = {unit: power for power, unit in enumerate("_KMGTPE")} | {"": 0}
_DURATION_PART = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|min|m|h|d|w|y)")
_SECONDS = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
    "y": 365 * 86400.0,
}


def parse_size(text: str) -> int:
    """Given "512", "64K", "1.5G" or "2 GiB", return bytes; a unit is always a power of 1024.

    Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        msg = f"{text!r} is not a size: write a number and K, M, G, T, P or E, as in 512M or 1.5G"
        raise ValueError(msg)
    return int(float(match["number"]) * 1024 ** _POWERS[match["unit"].upper()])


def format_size(size_bytes: int) -> str:
    """Given bytes, return "0 B", "512 B", "1.5 GiB": at most one decimal, binary units."""
    value = float(abs(size_bytes))
    sign = "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.95 would print as 1024.0: it belongs to the next unit.
        if value < 1023.95 if unit != "B" else value < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} EiB"


def parse_duration(text: str) -> float:
    """Given "250ms", "30s", "5m", "1h30m", "2d" or "0", return seconds.

    A bare number other than 0 is refused: nobody should have to guess its unit. Raises ValueError.
    """
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    total, position = 0.0, 0
    while position < len(stripped):
        match = _DURATION_PART.match(stripped, position)
        if match is None:
            msg = f"{text!r} is not a duration: write a number and ms, s, m, h, d, w or y, as in 250ms, 30s or 1h30m"
            raise ValueError(msg)
        total += float(match["number"]) * _SECONDS[match["unit"]]
        position = match.end()
        while position < len(stripped) and stripped[position] == " ":
            position += 1
    if not stripped:
        msg = "an empty text is not a duration"
        raise ValueError(msg)
    return total


def format_duration(seconds: float) -> str:
    """Given seconds, return "0.8 ms", "31 ms", "2.5 s", "3 min 20 s", "5 h 40 min" or "2 d 3 h": two units at most."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit} {rest} {small_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"
