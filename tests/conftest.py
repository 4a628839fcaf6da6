"""Tiers, requirements, the rule about skipping, leftovers, and the summary by tier."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from support import requirements, server, storage
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator

_TESTS = Path(__file__).parent
TIERS = ("unit", "contract", "golden", "integration", "crash", "guest", "lab")
_GUEST_NEEDS = ("root", "device-mapper", "scratch-disk", "lvm")
# A tier's tests may take this long each, in seconds; a test's own @pytest.mark.timeout wins.
_TIMEOUTS_S = {"unit": 60, "golden": 60, "contract": 300, "integration": 300, "crash": 600, "guest": 900, "lab": 900}
# A folder that runs side by side see: each file of tests is run by the one that made a folder of its name in it. One of
# them may begin at the end. Not for what tests start.
_QUEUE = os.environ.pop("SNAPMGR_TEST_QUEUE", None)
_LONGEST = frozenset({"test_guest_boots.py"})
_BACKWARDS = os.environ.pop("SNAPMGR_TEST_BACKWARDS", "") == "1"
# A file that gets the name of each test that fails, and a line with "!" for what no second try can mend.
_FAILED = os.environ.pop("SNAPMGR_TEST_FAILED", None)
# Set by CI: what cannot run there is a hole in the proof, not a footnote.
_FORBID_SKIP = os.environ.get("SNAPMGR_FORBID_SKIP") == "1"

# No time is looked at: another run may have the processors.
_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("dev", max_examples=60, **_UNTIMED)
hypothesis.settings.register_profile("ci", max_examples=500 if CAMPAIGN else 60, derandomize=True, **_UNTIMED)
hypothesis.settings.load_profile(os.environ.get("SNAPMGR_HYPOTHESIS_PROFILE", "dev"))


class _Tally:
    """What became of each tier's tests."""

    def __init__(self) -> None:
        self.collected: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.not_run: dict[tuple[str, str], int] = Counter()
        self.not_covered: Counter[str] = Counter()
        self.leftovers: list[str] = []


_TALLY = pytest.StashKey[_Tally]()
# Of a test: why the server that it needs is not to be had, which fails no run.
_NOT_COVERED = pytest.StashKey[str]()


def _tier(path: Path) -> str:
    relative = path.relative_to(_TESTS)
    if relative.parts[0] not in TIERS or len(relative.parts) == 1:
        raise pytest.UsageError(f"tests/{relative} is in no tier: put it into one of the folders {', '.join(TIERS)}")
    return relative.parts[0]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = _Tally()
    # Without this SIGTERM ends pytest on the spot, and mounts, loop devices and servers stay behind.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Under nohup, or in the background of a script, we were started with these ignored, and so would be all we start.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    storage.sweep_dead()
    if os.geteuid() == 0:
        storage.keep_mounts_private()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        tier = _tier(item.path)
        item.add_marker(tier)
        config.stash[_TALLY].collected[tier] += 1
        if tier in _TIMEOUTS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUTS_S[tier]))
        wanted = [name for mark in item.iter_markers("needs") for name in mark.args]
        wanted += _GUEST_NEEDS if tier == "guest" else ()
        try:
            absent = requirements.lacking(wanted)
        except KeyError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error.args[0]}") from None
        if reason := requirements.uncovered(wanted):
            item.stash[_NOT_COVERED] = reason
        if absent:
            item.add_marker(pytest.mark.skip(reason="; ".join(absent)), append=False)
    # The quick tiers first: what is broken there explains failures further on.
    items.sort(key=lambda item: TIERS.index(_tier(item.path)))
    if _QUEUE is not None:
        # Nobody can take half of it: begun last it would run when all others have ended.
        items.sort(key=lambda item: item.path.name not in _LONGEST)
    if _BACKWARDS:
        places = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: -places[item.path])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The guest's tests are run by `./run test guest` where the kernel has no device-mapper; to skip them would fail CI.
    named = any(str(argument).startswith(("tests/guest", str(_TESTS / "guest"))) for argument in config.args)
    if collection_path == _TESTS / "guest" and not named and requirements.lacking(_GUEST_NEEDS):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if _QUEUE is None or _mine(Path(_QUEUE), str(item.path.relative_to(_TESTS)).replace("/", "+")):
        return None
    item.config.stash[_TALLY].collected[_tier(item.path)] -= 1
    # The test before left what it shares with this one set up, a folder say, which the next one may not share.
    item.session._setupstate.teardown_exact(nextitem)
    return True


@cache
def _mine(queue: Path, name: str) -> bool:
    try:
        (queue / name).mkdir()
    except FileExistsError:
        return False
    return True


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:  # noqa: ARG001
    report = yield
    tally, tier = item.config.stash[_TALLY], _tier(item.path)
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = _skip_reason(report)
        tally.not_run[tier, reason] += 1
        if uncovered := item.stash.get(_NOT_COVERED, None):
            tally.not_covered[uncovered] += 1
        elif _FORBID_SKIP:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} did not run, and here everything must: {reason}"
    if report.when == "call" or report.outcome != "passed":
        tally.outcomes[tier][report.outcome] += 1
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _note_failed(report.nodeid)


def _note_failed(line: str) -> None:
    if _FAILED is not None:
        with open(_FAILED, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.skipped:
        reason = _skip_reason(report)
        collector.config.stash[_TALLY].not_run[_tier(collector.path), f"{collector.nodeid}: {reason}"] += 1
        if _FORBID_SKIP:
            report.outcome = "failed"
            report.longrepr = f"{collector.nodeid} did not run, and here everything must: {reason}"
    return report


# After pytest's own, which ends what is still set up when a run was cut short.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    tally = session.config.stash[_TALLY]
    server.close_template()
    tally.leftovers = storage.leftovers()
    if tally.leftovers:
        _note_failed("! left behind")
        storage.sweep(os.getpid())
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash[_TALLY]
    write = terminalreporter.write_line
    terminalreporter.section("tests per tier")
    write(f"{'tier':<12}{'tests':>7}{'passed':>8}{'failed':>8}{'not run':>9}")
    for tier in TIERS:
        if tally.collected[tier]:
            outcome = tally.outcomes[tier]
            not_run = sum(count for (where, _), count in tally.not_run.items() if where == tier)
            write(f"{tier:<12}{tally.collected[tier]:>7}{outcome['passed']:>8}{outcome['failed']:>8}{not_run:>9}")
    if tally.not_run:
        terminalreporter.section("not run, and why")
        for (tier, reason), count in sorted(tally.not_run.items()):
            write(f"{tier:<12}{count:>4} × {reason}")
    if tally.not_covered:
        terminalreporter.section("NOT COVERED", red=True)
        for reason, count in sorted(tally.not_covered.items()):
            write(f"{count:>4} tests × {reason}")
    if tally.leftovers:
        terminalreporter.section("LEFT BEHIND by the tests (removed now)", red=True)
        for line in tally.leftovers:
            write(line)
