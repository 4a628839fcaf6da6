"""A workbench on a plain folder, whose snapshots are full copies: for tests of what a scenario does with one."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api import Found, Pool, Usage
from snapmgr.bench.fio import FioRun, Section, run_fio
from snapmgr.bench.measure.counters import Counters
from snapmgr.bench.measure.layout import BlockLayout, lay_out
from snapmgr.bench.model import Parameters, Scenario, Stack
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from snapmgr.api import Completed, FolderCloning
    from snapmgr.bench.model import Measuring, ProfileName

POOL = Pool(backend="plain", id="plain", hint="")


class PlainSnapshot:
    """A copy, or with `PlainBench.shares` the origin itself: a snapshot that is none."""

    def __init__(self, bench: PlainBench, name: str) -> None:
        self._bench = bench
        self._path = bench.path if bench.shares else bench.copies / name
        self.name = name
        started = time.monotonic()
        if not bench.shares:
            shutil.copytree(bench.path, self._path)
        self.create_s = self.whole_s = time.monotonic() - started

    @contextmanager
    def opened(self, *, writable: bool = False) -> Iterator[Path]:
        del writable
        yield self._path

    def usage(self) -> Usage:
        size = sum(path.stat().st_size for path in self._path.rglob("*") if path.is_file())
        return Usage(exclusive_bytes=size, valid=not self._bench.overflows)

    def delete(self, *, wait: str = "space") -> float:
        assert wait in {"name", "space"}
        self._bench.snapshots.remove(self)
        if not self._bench.shares:
            shutil.rmtree(self._path)
        return 0.001


class PlainBench:
    """See `snapmgr.bench.model.Workbench`; `shares` and `overflows` make its snapshots bad ones."""

    def __init__(self, base: Path, parameters: Parameters, *, backend: str | None = "plain") -> None:
        self.stack = Stack(name="plain", title="a folder", backend=backend)
        self.parameters = parameters
        self.path, self.folder, self.copies = base / "data", base / "kept", base / "copies"
        for folder in (self.path, self.folder, self.copies):
            folder.mkdir()
        self.shares = False
        self.cloner: FolderCloning | None = None
        self.overflows = False
        self.snapshots: list[PlainSnapshot] = []
        self.taken = 0
        self.told: list[str] = []
        self.commands: list[tuple[str, ...]] = []

    def snapshot(self, held: AbstractContextManager[object] | None = None) -> PlainSnapshot:
        assert self.stack.backend is not None
        self.taken += 1
        with held or nullcontext():
            self.snapshots.append(PlainSnapshot(self, f"s{self.taken}"))
        return self.snapshots[-1]

    def at_once(self) -> bool:
        """A copy takes its time."""
        return False

    def inventory(self) -> tuple[Found, ...]:
        return tuple(Found(kind="snapshot", pool=POOL, name=one.name) for one in self.snapshots)

    def cloning(self) -> FolderCloning | None:
        return self.cloner

    def measured(self) -> AbstractContextManager[Measuring]:
        return Counters(()).measured()

    def fio(self, name: str, sections: Mapping[str, Section]) -> FioRun:
        return run_fio(name, sections, directory=self.path, keep=self.folder, runner=CommandRunner())

    def run(self, argv: Sequence[str], *, timeout_s: float | None = None) -> Completed:
        self.commands.append(tuple(argv))
        return CommandRunner().run(argv, timeout_s=timeout_s)

    def cold(self) -> None:
        return None

    def quiet(self) -> float:
        return 0.0

    def layout(self, file: Path) -> BlockLayout:
        """Not asked for: a folder in memory does not tell."""
        return lay_out([], size_bytes=file.stat().st_size)

    def tell(self, text: str) -> None:
        self.told.append(text)


def completed(
    scenario: Scenario,
    *,
    profile: ProfileName = "smoke",
    size_bytes: int = 0,
    variant: str | None = None,
    **extra: object,
) -> Parameters:
    """Return a scenario's parameters for one profile; `extra` goes over what that has."""
    given = Parameters(
        profile=profile,
        variant=next(iter(scenario.variants), "") if variant is None else variant,
        size_bytes=size_bytes,
        memory_bytes=1 << 30,
        seed=7,
        extra=extra,
    )
    return scenario.parameters(given)
