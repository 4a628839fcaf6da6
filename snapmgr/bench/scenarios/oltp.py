"""Measures the cost of a snapshot to a running database: sysbench on a private MariaDB before, during and after."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snapmgr.bench.load.mariadb import PROGRAMS, Hold, PrivateMariadb, install, private_mariadb
from snapmgr.bench.load.sysbench import Report, Sysbench
from snapmgr.bench.measure.memory import memory_bytes
from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.contract.errors import CommandError, ConfigError
from snapmgr.contract.units import format_size
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from snapmgr.bench.model import MetricInfo, Parameters, ProfileName, Snapshot, Stack, Workbench

_MIB = 1 << 20
# A row of sbtest with its place in the two indexes, as it lies in a freshly filled table.
_ROW_BYTES = 230
_TABLES = 4
_THREADS = 8
# Data this many times as large as the buffer pool: most pages come from the storage.
_POOL_SHARE = 4
_LEAST_POOL_BYTES = 16 * _MIB
# Such data must not fit into limited memory.
_BUFFERED_SMOKE = 192 * _MIB
# Redo and binary logs, system tables, and new data of the run.
_AROUND_BYTES = 512 * _MIB
_REDO_BYTES = 96 * _MIB
# Largest share of the run's memory for the buffer pool.
_MEMORY_SHARE = 0.5
_STALLED = 0.05


# "seconds": of each of the three runs.
_PROFILES: Mapping[ProfileName, Mapping[str, int]] = {
    "smoke": {"size_bytes": 32 * _MIB, "seconds": 3, "warm_up_s": 1},
    "quick": {"size_bytes": 256 * _MIB, "seconds": 8, "warm_up_s": 3},
    "standard": {"size_bytes": 4096 * _MIB, "seconds": 60, "warm_up_s": 30},
    "paper": {"size_bytes": 20480 * _MIB, "seconds": 300, "warm_up_s": 120},
}
METHODS = {"o_direct": "O_DIRECT", "o_dsync": "O_DSYNC", "fsync": "fsync"}
"""InnoDB's name of each variant."""


class Oltp(Scenario):
    """See `snapmgr.bench.model.Scenario`."""

    name = "oltp"
    title = "What does a snapshot cost a running MariaDB: transactions before, while and after it is taken?"
    label = "A running MariaDB"
    variants = tuple(METHODS)
    programs = ("sysbench", *PROGRAMS)
    metrics: tuple[MetricInfo, ...] = (
        metric("before_tps", "Transactions a second, before there is a snapshot", "1/s", "more"),
        metric("during_tps", "Transactions a second, while the snapshot is taken", "1/s", "more"),
        metric("after_tps", "Transactions a second, with the snapshot", "1/s", "more", headline=True),
        metric("before_p95_s", "95 % of the transactions take less, before", "s", "less"),
        metric("during_p95_s", "95 % of the transactions take less, while it is taken", "s", "less"),
        metric("after_p95_s", "95 % of the transactions take less, with the snapshot", "s", "less", headline=True),
        metric("during_max_s", "Longest transaction while the snapshot is taken", "s", "less"),
        metric("kept", "Share of the transactions a second that is left with the snapshot", "", "more"),
        metric("stalled_s", "Seconds with hardly a transaction while the snapshot is taken", "s", "less"),
        metric("held_s", "Writers held still for the snapshot", "s", "less"),
        metric("create_s", "The storage's call", "s", "less"),
        metric("recovery_s", "A server's start on a clone of the snapshot, and a look at all rows", "s", "less"),
        metric("after_written_bytes", "Written at the device for each transaction, with the snapshot", "B", "less"),
    )

    def suits(self, stack: Stack) -> str | None:
        """Refuse JuiceFS: a live server's files there cannot be compared with disks."""
        return "it compares file systems under a live server" if stack.backend == "juicefs" else None

    def parameters(self, given: Parameters) -> Parameters:
        """Complete: sizes, seconds, clients, and the buffer pool.

        Raises ConfigError for an unknown variant, and for a buffered one with data that fit into the cache.
        """
        if given.variant not in METHODS:
            raise ConfigError(f"{self.name} has no variant {given.variant!r}", hint=f"there are: {', '.join(METHODS)}")
        profile = _PROFILES[given.profile]
        size_bytes = given.size_bytes or profile["size_bytes"]
        if not given.size_bytes and given.variant != "o_direct":
            size_bytes = max(size_bytes, _BUFFERED_SMOKE)
        if given.variant != "o_direct" and size_bytes <= given.memory_bytes:
            raise ConfigError(
                f"with {METHODS[given.variant]} InnoDB reads through the page cache, and {format_size(size_bytes)} of"
                f" data fit into memory ({format_size(given.memory_bytes)})",
                hint="use a --size larger than the memory, or limit the memory (--memory)",
            )
        pool = max(size_bytes // _POOL_SHARE, _LEAST_POOL_BYTES)
        extra: dict[str, Any] = {
            "tables": _TABLES,
            "rows": max(size_bytes // _TABLES // _ROW_BYTES, 1000),
            "threads": _THREADS,
            "seconds": profile["seconds"],
            "warm_up_s": profile["warm_up_s"],
            "buffer_pool_bytes": min(pool, int(min(given.memory_bytes, memory_bytes()) * _MEMORY_SHARE)),
            # A second server recovers on the snapshot, and may write all of it.
            "scratch_bytes": size_bytes,
        } | dict(given.extra)
        return replace(given, size_bytes=size_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample: the data, rewritten once beside the snapshot, and logs."""
        extra = parameters.extra
        loaded_s = parameters.size_bytes / 15e6
        return Needs(
            space_bytes=2 * parameters.size_bytes + _AROUND_BYTES,
            seconds=12 + loaded_s + 3 * extra["seconds"] + extra["warm_up_s"],
        )

    def run(self, bench: Workbench) -> Outcome:
        """Fill, warm up, run three times with a snapshot in the middle of the second (a control: none), recover it."""
        extra = bench.parameters.extra
        datadir = bench.path / "data"
        bench.tell("installs a server")
        install(datadir, CommandRunner())
        with private_mariadb(datadir, bench.folder / "m", server_options(bench.parameters)) as server:
            work = Sysbench(
                run_program=bench.run,
                socket=server.socket,
                tables=extra["tables"],
                rows=extra["rows"],
                threads=extra["threads"],
                seed=bench.parameters.seed,
            )
            with server.connect() as connection:
                connection.execute("CREATE DATABASE sbtest")
            bench.tell("fills its tables")
            work.prepare()
            bench.tell("warms up")
            work.run(extra["warm_up_s"])
            bench.tell("runs without a snapshot")
            before = work.run(extra["seconds"])
            hold, snapshot = Hold(), None
            if bench.stack.backend is None:
                bench.tell("runs on without a snapshot")
                during = work.run(extra["seconds"])
            else:
                bench.tell("runs while a snapshot is taken")
                during, snapshot = _taken_in_the_middle(bench, work, server, hold)
            bench.tell("runs with the snapshot" if snapshot else "runs on without a snapshot")
            with bench.measured() as measuring:
                after = work.run(extra["seconds"])
            server.stop()
        reports = {"before": before, "during": during, "after": after}
        figures = {
            "kept": after.tps / before.tps,
            "stalled_s": float(sum(tps < _STALLED * before.tps for tps in during.seconds_tps)),
            "during_max_s": during.max_s,
            "after_written_bytes": measuring.spent.written_bytes / (after.tps * extra["seconds"]),
        }
        outcome = Outcome(metrics=figures)
        _add_transactions(outcome, reports)
        if snapshot is None:
            outcome.notes.append("a control: no snapshot was taken, so the later runs show what time alone changes")
            return outcome
        bench.tell("recovers the snapshot")
        recovery_s, check = _recovered(bench, snapshot, extra)
        outcome.metrics |= {"held_s": hold.seconds, "create_s": snapshot.create_s, "recovery_s": recovery_s}
        outcome.checks.append(check)
        if not bench.at_once():
            outcome.notes.append("files are copied one by one: the server was frozen meanwhile")
        return outcome


def server_options(parameters: Parameters) -> tuple[str, ...]:
    """Return the options of the measured server."""
    return (
        f"--innodb-flush-method={METHODS[parameters.variant]}",
        f"--innodb-buffer-pool-size={parameters.extra['buffer_pool_bytes']}",
        f"--innodb-log-file-size={_REDO_BYTES}",
    )


def _add_transactions(outcome: Outcome, reports: Mapping[str, Report]) -> None:
    for when, report in reports.items():
        outcome.metrics |= {f"{when}_tps": report.tps, f"{when}_p95_s": report.p95_s}
    series = [tps for report in reports.values() for tps in report.seconds_tps]
    title = f"Transactions of each second: {', '.join(reports)}"
    seconds = range(1, len(series) + 1)
    outcome.add_curve("tps", series, seconds, title=title, x_title="Time", x_unit="s", unit="1/s")


def _taken_in_the_middle(
    bench: Workbench, work: Sysbench, server: PrivateMariadb, hold: Hold
) -> tuple[Report, Snapshot]:
    """Take a snapshot after a third of a run; return the run and the snapshot."""
    seconds = bench.parameters.extra["seconds"]
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(work.run, seconds)
        # A run that ended early has failed; the reason is raised below.
        _wait_for(running, seconds / 3)
        snapshot = bench.snapshot(server.held(hold, at_once=bench.at_once()))
        return running.result(), snapshot


def _wait_for(running: Any, seconds: float) -> None:  # noqa: ANN401 - a Future
    try:
        running.exception(timeout=seconds)
    except TimeoutError:
        return
    running.result()


def _recovered(bench: Workbench, snapshot: Snapshot, extra: Any) -> tuple[float, Check]:  # noqa: ANN401
    """Start a server on a clone of the snapshot, and count rows: each transaction deletes one and inserts one."""
    wanted = extra["tables"] * extra["rows"]
    found, damaged = 0, list[str]()
    with snapshot.opened(writable=True) as folder, bench.measured() as measuring:
        try:
            found, damaged = _counted(folder / "data", bench.folder / "r", extra)
        except CommandError as error:
            damaged.append(error.message)
    detail = f"{found} of {wanted} rows" + (f"; {'; '.join(damaged)}" if damaged else "")
    check = Check(
        name="a server recovers from the snapshot with all rows", ok=found == wanted and not damaged, detail=detail
    )
    return measuring.spent.seconds, check


def _counted(datadir: Path, folder: Path, extra: Any) -> tuple[int, list[str]]:  # noqa: ANN401
    options = (f"--innodb-buffer-pool-size={extra['buffer_pool_bytes']}", f"--innodb-log-file-size={_REDO_BYTES}")
    found, damaged = 0, list[str]()
    with private_mariadb(datadir, folder, options) as server, server.connect() as connection:
        connection.set_read_timeout(3600)
        for number in range(1, extra["tables"] + 1):
            table = f"sbtest.sbtest{number}"
            found += int(str(connection.value(f"SELECT COUNT(*) FROM {table}")))  # noqa: S608 - names of our own
            said = {str(row["Msg_text"]) for row in connection.rows(f"CHECK TABLE {table}")}
            damaged += [f"{table}: {text}" for text in sorted(said - {"OK"})]
        server.stop()
    return found, damaged


scenario = Oltp()
