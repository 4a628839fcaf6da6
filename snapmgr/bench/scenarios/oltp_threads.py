"""Measures a database as clients are added, on file systems with and without a snapshot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from snapmgr.bench.load.mariadb import Hold, install, private_mariadb
from snapmgr.bench.load.sysbench import Report, Sysbench
from snapmgr.bench.model import Needs, Outcome, metric
from snapmgr.bench.scenarios.innodb_io import regression_note
from snapmgr.bench.scenarios.oltp import Oltp, server_options
from snapmgr.contract.errors import ConfigError
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from snapmgr.bench.model import Parameters, ProfileName, Workbench

_ALL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_THREADS = 1024
_THREADS: Mapping[ProfileName, tuple[int, ...]] = {"smoke": (1, 8), "quick": (1, 16, 128, 512)}
_POINT_S: Mapping[ProfileName, int] = {"smoke": 1, "quick": 3, "standard": 30, "paper": 120}
# sysbench prepares some ten statements for each table and client; the server's default is 16,382.
_ROOM = (f"--max-connections={_MOST_THREADS + 10}", f"--max-prepared-stmt-count={1 << 20}")


class OltpThreads(Oltp):
    """See `snapmgr.bench.model.Scenario`. Data, server and clients are those of `Oltp`."""

    name = "oltp-threads"
    title = "What does MariaDB get on each file system as clients are added, with a snapshot where there are any?"
    label = "MariaDB as clients are added"
    sweeps_threads = True
    metrics = (
        metric("tps_best", "Transactions a second, at the best number of clients", "1/s", "more", headline=True),
        metric("tps_least", "Transactions a second, with the fewest clients", "1/s", "more"),
        metric("tps_most", "Transactions a second, with the most clients", "1/s", "more", headline=True),
        metric("p95_least_s", "95 % of the transactions take less, with the fewest clients", "s", "less"),
        metric("p95_most_s", "95 % of the transactions take less, with the most clients", "s", "less"),
        metric("written_per_transaction_bytes", "Written at the device for each transaction", "B", "less"),
        metric("cpu_per_transaction_s", "Processor time for each transaction", "s", "less"),
    )

    def parameters(self, given: Parameters) -> Parameters:
        """Complete: those of `Oltp`, with the swept "threads" and the "point_s" of each number.

        Raises ConfigError as `Oltp`, and for numbers of threads that cannot be swept.
        """
        threads = tuple(given.extra.get("threads", _THREADS.get(given.profile, _ALL)))
        wrong = [count for count in threads if not 1 <= count <= _MOST_THREADS]
        if wrong or not threads:
            raise ConfigError(f"{self.name} runs with 1 to {_MOST_THREADS} threads, not {wrong or 'none'}")
        extra = {"point_s": _POINT_S[given.profile], **given.extra, "threads": threads}
        return super().parameters(replace(given, extra=extra))

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample."""
        extra = parameters.extra
        swept_s = len(extra["threads"]) * (extra["point_s"] + 1)
        whole = super().needs(parameters)
        return replace(whole, seconds=12 + parameters.size_bytes / 15e6 + extra["warm_up_s"] + swept_s)

    def run(self, bench: Workbench) -> Outcome:
        """Fill, take a snapshot if the storage has any, warm up, and run with each number of clients."""
        extra = bench.parameters.extra
        found = Outcome(notes=[regression_note(os.uname().release)])
        datadir = bench.path / "data"
        bench.tell("installs a server")
        install(datadir, CommandRunner())
        options = (*server_options(bench.parameters), *_ROOM)
        with private_mariadb(datadir, bench.folder / "m", options) as server:
            work = Sysbench(
                run_program=bench.run,
                socket=server.socket,
                tables=extra["tables"],
                rows=extra["rows"],
                threads=extra["tables"],
                seed=bench.parameters.seed,
            )
            with server.connect() as connection:
                connection.execute("CREATE DATABASE sbtest")
            bench.tell("fills its tables")
            work.prepare()
            if bench.stack.backend is not None:
                bench.tell("takes a snapshot")
                bench.snapshot(server.held(Hold(), at_once=bench.at_once()))
                found.notes.append(
                    "with a snapshot that was taken before the first client: its copies are paid for here"
                )
            bench.tell("warms up")
            work.run(extra["warm_up_s"])
            reports = []
            with bench.measured() as measuring:
                for count in extra["threads"]:
                    bench.tell(f"{count} clients")
                    reports.append(replace(work, threads=count).run(extra["point_s"]))
            server.stop()
        _add(found, reports, extra["threads"])
        done = sum(report.tps for report in reports) * extra["point_s"]
        if done:
            found.metrics["written_per_transaction_bytes"] = measuring.spent.written_bytes / done
            found.metrics["cpu_per_transaction_s"] = measuring.spent.cpu_seconds / done
        return found


def _add(found: Outcome, reports: list[Report], threads: tuple[int, ...]) -> None:
    found.metrics |= {
        "tps_best": max(report.tps for report in reports),
        "tps_least": reports[0].tps,
        "tps_most": reports[-1].tps,
        "p95_least_s": reports[0].p95_s,
        "p95_most_s": reports[-1].p95_s,
    }
    curves = (
        ("tps", "Transactions a second", "1/s", [report.tps for report in reports]),
        ("p95", "Latency of a transaction, 95th percentile", "s", [report.p95_s for report in reports]),
    )
    for name, title, unit, values in curves:
        found.add_curve(f"{name}_by_threads", values, threads, title=title, x_title="clients", unit=unit)


scenario = OltpThreads()
