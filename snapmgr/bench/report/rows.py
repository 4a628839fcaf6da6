"""Turns samples into rows for a spreadsheet: one row per figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.bench.statistics.comparison import failure_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.bench.statistics.comparison import Sample

COLUMNS = (
    "run", "sample", "at", "scenario", "variant", "stack", "kind", "block", "position", "profile", "size_bytes",
    "metric", "unit", "value", "failure",
)  # fmt: skip


def rows(samples: Iterable[Sample]) -> list[tuple[str | int | float, ...]]:
    """Return the rows below `COLUMNS`; a sample without figures (failed, could not run) has a row without metric."""
    found: list[tuple[str | int | float, ...]] = []
    for one in samples:
        parameters = one["parameters"]
        head = (
            *(one[name] for name in ("run", "id", "at", "scenario", "variant", "stack", "kind", "block", "position")),
            *(parameters.get(name, "") for name in ("profile", "size_bytes")),
        )
        failure = failure_of(one)
        for name, value in one["metrics"].items():
            found.append((*head, name, one["infos"].get(name, {}).get("unit", ""), value, failure))
        if not one["metrics"]:
            found.append((*head, "", "", "", failure))
    return found
