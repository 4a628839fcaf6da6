"""What was measured: one JSON object a line in a file that grows, and the table that is made of it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from support.preparelab.cells import RESULT_ANYWHERE, WAYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prepare."""

    cell: str
    way: str
    data_mib: int
    """What was wanted of the backup; `facts` has what it is."""
    redo_mib: int
    seconds: float | None
    """From the beginning until the result is durable where it lies; None if it failed."""
    failure: str = ""
    checked: bool = False
    """Whether its tables were compared."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Parts of the time, what the store did, what was chosen and why."""
    at: str = ""
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What its repeats have in common."""
        return self.cell, self.way, self.data_mib, self.redo_mib


def append(path: Path, sample: Sample) -> None:
    """Write one line, durably."""
    line = json.dumps(asdict(sample) | {"at": datetime.now(UTC).isoformat(timespec="seconds")})
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Sample]:
    """Return what is in the file; nothing if there is none. A line that a kill cut off is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    samples = []
    for number, line in enumerate(lines):
        try:
            values = json.loads(line)
        except ValueError:
            if number == len(lines) - 1:
                continue
            raise
        if values.get("schema") == SCHEMA:
            samples.append(Sample(**values))
    return samples


def counts(samples: Iterable[Sample]) -> dict[tuple[str, str, int, int], int]:
    """Return how many good samples there are of each kind."""
    found: dict[tuple[str, str, int, int], int] = defaultdict(int)
    for sample in samples:
        found[sample.key] += sample.seconds is not None
    return dict(found)


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return for each cell and size the medians and spreads, and how "auto" compares."""
    groups: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    failed: dict[tuple[str, int, int], dict[str, str]] = defaultdict(dict)
    for sample in samples:
        group = (sample.cell, sample.data_mib, sample.redo_mib)
        if sample.seconds is None:
            failed[group][sample.way] = sample.failure
        else:
            groups[group][sample.way].append(sample.seconds)
    rows = []
    for group in sorted({*groups, *failed}):
        ways = {
            name: {"median_s": median(times), "least_s": min(times), "most_s": max(times), "samples": len(times)}
            for name, times in groups[group].items()
        }
        middle = {name: float(found["median_s"]) for name, found in ways.items()}
        best = min((middle[name] for name in RESULT_ANYWHERE if name in middle), default=None)
        auto, default = middle.get("auto"), middle.get("default")
        rows.append(
            {
                "cell": group[0],
                "data_mib": group[1],
                "redo_mib": group[2],
                "ways": ways,
                "failed": failed[group],
                "auto_by_best": auto / best if auto and best else None,
                "default_by_auto": default / auto if auto and default else None,
            }
        )
    return rows


def table(samples: Sequence[Sample]) -> str:
    """Return the medians, with the least and the most behind them, in Markdown."""
    rows = summary(samples)
    names = [way.name for way in WAYS if any(way.name in (*row["ways"], *row["failed"]) for row in rows)]
    lines = [
        "| Cell | Data, redo (MiB) | " + " | ".join([*names, "auto / best", "default / auto"]) + " |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in rows:
        cells = [_time(row["ways"].get(name), row["failed"].get(name)) for name in names]
        ratios = [f"{row[name]:.2f}" if row[name] else "" for name in ("auto_by_best", "default_by_auto")]
        lines.append(
            f"| {row['cell']} | {row['data_mib']}, {row['redo_mib']} | " + " | ".join([*cells, *ratios]) + " |"
        )
    return "\n".join(lines)


def _time(found: dict[str, Any] | None, failure: str | None) -> str:
    if found is None:
        return "failed" if failure is not None else ""
    text = f"{found['median_s']:.1f}"
    return text if found["samples"] == 1 else f"{text} ({found['least_s']:.1f}–{found['most_s']:.1f})"
