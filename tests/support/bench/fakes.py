"""A scenario, a target and a workbench that take no storage: how the conductor works can be seen in milliseconds."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapmgr.api import Reason
from snapmgr.bench.model import Check, MetricInfo, Needs, Outcome, Parameters, Spent, Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STACKS = {
    name: Stack(name=name, title=name.upper(), backend="fake" if name != "control" else None)
    for name in ("one", "two", "three", "control")
}


class FakeClock:
    """A clock that goes on when somebody works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeScenario:
    """Takes `seconds` of the clock; its figure is made by `figure`, given stack and how often it ran there."""

    def __init__(
        self,
        name: str = "work",
        *,
        figure: Callable[[str, int], float] = lambda _stack, _times: 1.0,
        seconds: float = 2.0,
        clock: FakeClock | None = None,
        variants: tuple[str, ...] = (),
        lacks: str = "",
        unfit: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.title = "How long the work takes"
        self.label = "The work"
        self.variants = variants
        self.programs = ()
        self.sweeps_threads = False
        self.metrics = (MetricInfo(name="work_s", title="Work", unit="s", better="less", headline=True),)
        self.clock = clock or FakeClock()
        self.ran: list[str] = []
        self.check_ok = True
        self._figure, self._seconds, self._lacks, self._unfit = figure, seconds, lacks, unfit

    def missing(self) -> tuple[Reason, ...]:
        return (Reason(what=self._lacks, hint="install it"),) if self._lacks else ()

    def suits(self, stack: Stack) -> str | None:
        return f"{stack.title} is not fit for it" if stack.name in self._unfit else None

    def needs(self, parameters: Parameters) -> Needs:
        return Needs(space_bytes=2 * parameters.size_bytes, seconds=self._seconds)

    def parameters(self, given: Parameters) -> Parameters:
        return given

    def run(self, bench: FakeWorkbench) -> Outcome:
        stack = bench.stack.name
        self.ran.append(stack)
        self.clock.now += self._seconds
        figure = self._figure(stack, self.ran.count(stack))
        return Outcome(metrics={"work_s": figure}, checks=[Check(name="it was done", ok=self.check_ok)])


class FakeWorkbench:
    def __init__(self, stack: Stack, parameters: Parameters, folder: Path) -> None:
        self.stack, self.parameters, self.folder = stack, parameters, folder

    def record(self) -> dict[str, Any]:
        return {
            "commands": [["mkfs.fake"]],
            "jobs": {"work": "[job]"},
            "provisioned": {"path": "/fake"},
            "guarantee": {"atomicity": "file", "clone": "native", "survives_origin": True},
        }


class FakeTarget:
    """Notes what it is asked; `gone` makes its check fail."""

    size_bytes = 1 << 30
    discard = True
    kind: Literal["loop", "device"] = "loop"
    title = "a fake device"

    def __init__(self, device: str = "/dev/fake") -> None:
        self.device = device
        self.asked: list[str] = []
        self.gone: Exception | None = None

    def check(self) -> None:
        self.asked.append("check")
        if self.gone:
            raise self.gone

    def blank(self) -> None:
        self.asked.append("blank")

    def made(self) -> None:
        self.asked.append("made")

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind}


class FakeBench:
    """Makes workbenches, and notes for which stacks and where; `fail` raises instead."""

    def __init__(self) -> None:
        self.fail: Callable[[str], Exception | None] = lambda _stack: None
        self.folders: list[Path] = []

    @contextmanager
    def __call__(self, stack: Stack, parameters: Parameters, *, folder: Path, **_: object) -> Iterator[FakeWorkbench]:
        assert folder.is_dir()
        self.folders.append(folder)
        if error := self.fail(stack.name):
            raise error
        yield FakeWorkbench(stack, parameters, folder)


class _Part:
    spent = Spent(seconds=1.0, cpu_seconds=0.5, read_bytes=0, written_bytes=4096, reads=0, writes=1, steal_seconds=0.0)


@contextmanager
def fake_counted() -> Iterator[_Part]:
    """Count nothing."""
    yield _Part()
