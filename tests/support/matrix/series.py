"""One site's cells, one after another on the same server, each with a number of snapshots."""

from __future__ import annotations

import signal
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.access.deletion import delete
from support.load import write_load
from support.matrix.binlogs import Prefix
from support.matrix.checking import check
from support.matrix.results import by_cell, snapshot_result, text_result
from support.matrix.sites import running_site
from support.matrix.taking import refuse, take

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from support.load import WriteLoad
    from support.matrix.cells import Cell
    from support.matrix.results import Result
    from support.matrix.sites import Site

WRITERS = 8
# So many snapshots are on the file system at once.
_BATCH = 10


class CellTimeoutError(Exception):
    """A cell took longer than it may."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is missing of a cell."""

    cell: Cell
    snapshots: int
    """How many are to be taken; of a cell that is refused, one try."""
    replay: bool = True
    """Whether the first of them gets the source's further binary logs replayed."""


def missing_tasks(cells: Sequence[Cell], results: Sequence[Result], snapshots: int) -> list[Task]:
    """Return what the results lack of `snapshots` of each cell, a replay, or a refusal. Failures are tried again."""
    found = by_cell(results)
    tasks = []
    for cell in cells:
        there = [one for one in found.get(cell.id, []) if one.kind != "failed"]
        wanted = (1 if cell.refusal is not None else snapshots) - len(there)
        if wanted > 0:
            tasks.append(Task(cell=cell, snapshots=wanted, replay=all(one.replay is None for one in there)))
    return tasks


def run_site(tasks: Sequence[Task], limit_s: float | None) -> Iterator[Result]:
    """Given what is missing of cells of one site, yield a result for each snapshot, refusal and failure.

    A cell that fails yields a failure, and those after it get a server of their own. So does one that takes longer than
    `limit_s` for each of its snapshots, and as long twice for what is done once; None: it may take as long as it will.
    """
    left = list(tasks)
    while left:
        try:
            with ExitStack() as stack:
                with _bounded(limit_s, left[0]):
                    site = stack.enter_context(running_site(left[0].cell))
                    engines = left[0].cell.other_engines
                    load = stack.enter_context(
                        write_load(str(site.scene.server.socket), writers=WRITERS, engines=engines, start=False)
                    )
                # Of all its cells: what they are compared with goes forward only, too.
                prefix = Prefix(site)
                ((version,),) = site.scene.server.query("SELECT VERSION()")
                while left:
                    with _bounded(limit_s, left[0]):
                        yield from _run_cell(site, load, prefix, left[0], version)
                    del left[0]
        except Exception as error:
            if not left:
                raise
            yield text_result(left[0].cell, "failed", f"{type(error).__name__}: {error}")
            del left[0]


def _run_cell(site: Site, load: WriteLoad, prefix: Prefix, task: Task, version: str) -> Iterator[Result]:
    if task.cell.refusal is not None:
        yield text_result(task.cell, "refused", refuse(site, task.cell), version)
        return
    replayed = not task.replay
    for begun in range(0, task.snapshots, _BATCH):
        batch = take(site, task.cell, load, min(_BATCH, task.snapshots - begun))
        ctx = site.scene.context()
        for taken in batch:
            findings = check(site, task.cell, taken, prefix, replayed=not replayed)
            replayed = True
            delete(ctx, taken.manifest)
            yield snapshot_result(task.cell, taken, findings, version)


@contextmanager
def _bounded(limit_s: float | None, task: Task) -> Iterator[None]:
    """Raise CellTimeoutError in the main thread when the cell's time is over."""

    if limit_s is None:
        yield
        return
    whole_s = limit_s * (task.snapshots + 2)

    def over(_number: int, _frame: FrameType | None) -> None:
        raise CellTimeoutError(f"{task.cell.id} took longer than {whole_s:g} s")

    before = signal.signal(signal.SIGALRM, over)
    timer = signal.setitimer(signal.ITIMER_REAL, whole_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
