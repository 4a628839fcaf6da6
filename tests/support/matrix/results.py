"""What was seen, one JSON object a line in a file that grows: a snapshot, a refusal or a failure each."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.matrix.cells import Cell
    from support.matrix.checking import Findings
    from support.matrix.taking import Taken

SCHEMA = 1
_FOLDER = re.compile(r"/\S*snapmgr-test-[^/\s]*(/mnt\b)?")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the file."""

    cell: str
    """`Cell.id`."""
    kind: Literal["snapshot", "refused", "failed"]
    text: str = ""
    """Of a refusal or a failure: the reason."""
    level: str = ""
    """The level that was used, which "auto" chose."""
    position: str = ""
    """"exact", "absent", or what is wrong."""
    invariant: str = ""
    """"" if it held, else what is wrong; the next two as well."""
    lost: str = ""
    replay: str | None = None
    """None where it was not tried."""
    times: dict[str, float] = field(default_factory=dict)
    """As `support.matrix.taking.Taken.times`, seconds."""
    version: str = ""
    """The server's."""
    at: str = ""
    schema: int = SCHEMA

    @property
    def wrong(self) -> list[str]:
        """What must never be."""
        position = self.position if self.position not in ("exact", "absent", "") else ""
        return [text for text in (self.invariant, self.lost, position, self.replay) if text]


def snapshot_result(cell: Cell, taken: Taken, findings: Findings, version: str) -> Result:
    """Return the line for a snapshot that was checked."""
    quiesce = taken.manifest.quiesce
    right = "exact" if taken.manifest.position is not None else "absent"
    return Result(
        cell=cell.id,
        kind="snapshot",
        level=quiesce.level if quiesce is not None else "",
        position=findings.position or right,
        invariant=findings.invariant,
        lost=findings.lost,
        replay=findings.replay,
        times=taken.times,
        version=version,
        at=_now(),
    )


def text_result(cell: Cell, kind: Literal["refused", "failed"], text: str, version: str = "") -> Result:
    """Return the line for a refusal or a failure, without the names of this run's folders."""
    return Result(cell=cell.id, kind=kind, text=_FOLDER.sub("…", text), version=version, at=_now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def append(path: Path, result: Result) -> None:
    """Write one line, whole or not at all as far as a later `read` is concerned."""
    with path.open("a+b") as file:
        # What was cut short ends here, so that this line is one of its own.
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.write(b"\n")
        file.write(json.dumps(asdict(result), ensure_ascii=False).encode() + b"\n")


def read(path: Path) -> list[Result]:
    """Return the lines of a file, none if it does not exist; one that was cut short is left out.

    Raises ValueError for lines of another schema.
    """
    results = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if values.get("schema") != SCHEMA:
            raise ValueError(f"{path} is of schema {values.get('schema')}, not {SCHEMA}: name another file")
        results.append(Result(**values))
    return results


def by_cell(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results of each cell. A failure counts until the cell yields anything else."""
    cells: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.kind != "failed":
            cells[result.cell] = [one for one in cells[result.cell] if one.kind != "failed"]
        cells[result.cell].append(result)
    return dict(cells)
