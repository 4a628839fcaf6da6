"""The scenario oltp-threads: what is swept, and what is made of sysbench's reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapmgr.bench.load.sysbench import Report
from snapmgr.bench.model import Outcome, Parameters
from snapmgr.bench.scenarios import oltp_threads
from snapmgr.bench.scenarios.oltp import scenario as oltp
from snapmgr.contract.errors import ConfigError

SCENARIO = oltp_threads.scenario
GIVEN = Parameters(profile="quick", variant="o_direct", size_bytes=0, memory_bytes=1 << 60, seed=1)


def test_data_and_server_are_those_of_oltp_and_threads_those_asked_for():
    ours, theirs = SCENARIO.parameters(GIVEN), oltp.parameters(GIVEN)
    assert ours.extra["threads"] == (1, 16, 128, 512)
    same = {"tables", "rows", "buffer_pool_bytes"}
    assert {name: ours.extra[name] for name in same} == {name: theirs.extra[name] for name in same}
    asked = SCENARIO.parameters(replace(GIVEN, extra={"threads": (1, 8)}))
    assert asked.extra["threads"] == (1, 8)
    assert SCENARIO.needs(asked).seconds < SCENARIO.needs(ours).seconds
    assert SCENARIO.parameters(replace(GIVEN, profile="paper")).extra["threads"][-1] == 512
    assert SCENARIO.parameters(asked) == asked


@pytest.mark.parametrize("threads", [(0,), (1, 1025), ()])
def test_numbers_that_cannot_be_swept_are_refused(threads):
    with pytest.raises(ConfigError, match="oltp-threads runs with 1 to 1024 threads"):
        SCENARIO.parameters(replace(GIVEN, extra={"threads": threads}))


def test_data_that_fit_into_the_cache_are_refused_for_o_dsync_only():
    small = replace(GIVEN, size_bytes=32 << 20, memory_bytes=64 << 20)
    assert SCENARIO.parameters(small).size_bytes == 32 << 20
    with pytest.raises(ConfigError, match="O_DSYNC InnoDB reads through the page cache"):
        SCENARIO.parameters(replace(small, variant="o_dsync"))


def test_the_best_the_fewest_and_the_most_clients_have_figures():
    found = Outcome()
    reports = [Report(tps=tps, p95_s=1 / tps, max_s=1, seconds_tps=(), seconds_p95_s=()) for tps in (10.0, 40.0, 20.0)]
    oltp_threads._add(found, reports, (1, 8, 64))
    assert (found.metrics["tps_best"], found.metrics["tps_least"], found.metrics["tps_most"]) == (40, 10, 20)
    assert found.metrics["p95_most_s"] == 0.05
    assert (found.series["tps_by_threads"], found.axes["tps_by_threads"]["x"]) == ([10, 40, 20], [1, 8, 64])
    known = {metric.name for metric in SCENARIO.metrics}
    assert set(found.metrics) | {"written_per_transaction_bytes", "cpu_per_transaction_s"} == known
