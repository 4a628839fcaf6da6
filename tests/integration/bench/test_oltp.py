"""The scenario oltp: a private server under sysbench, and its snapshot recovered."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from snapmgr.bench.model import Parameters
from snapmgr.bench.scenarios import oltp, oltp_threads
from snapmgr.contract.errors import ConfigError
from support.bench.device import scenario_bench
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.bench.storage.workbench import StackWorkbench

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4", "mariadbd", "sysbench")
_SIZE_BYTES = 1 << 30
_GIVEN = Parameters(profile="smoke", variant="o_direct", size_bytes=16 << 20, memory_bytes=1 << 60, seed=1)
_SHORT = replace(_GIVEN, extra={"seconds": 2})


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[StackWorkbench]:
    with scenario_bench(request.param, oltp.scenario.parameters(_SHORT), _SIZE_BYTES) as made:
        yield made


_STACKS = ("btrfs", "xfs-reflink", "btrfs-nocow") if CAMPAIGN else ("btrfs",)


@pytest.mark.parametrize("bench", _STACKS, indirect=True)
def test_a_snapshot_under_load_is_recovered(bench: StackWorkbench) -> None:
    taken = []
    snapshot = bench.snapshot
    bench.snapshot = lambda held=None: taken.append(snapshot(held)) or taken[-1]
    found = oltp.scenario.run(bench)
    assert [check.ok for check in found.checks] == [True]
    assert set(found.metrics) == {metric.name for metric in oltp.scenario.metrics}
    assert all(value > 0 for name, value in found.metrics.items() if name != "stalled_s")
    assert found.metrics["create_s"] < found.metrics["held_s"] < 30
    assert len(found.series["tps"]) == len(found.axes["tps"]["x"])
    # A row that is not there is noticed.
    wrong = dict(bench.parameters.extra) | {"rows": bench.parameters.extra["rows"] + 1}
    _, check = oltp._recovered(bench, taken[0], wrong)
    assert not check.ok
    assert "rows" in check.detail


@pytest.mark.parametrize("bench", ["ext4"], indirect=True)
def test_a_control_runs_without_a_snapshot(bench: StackWorkbench) -> None:
    found = oltp.scenario.run(bench)
    # As long and as often as with a snapshot: what a database loses with time alone is no snapshot's cost.
    of_snapshots = {"held_s", "create_s", "recovery_s"}
    assert set(found.metrics) == {metric.name for metric in oltp.scenario.metrics} - of_snapshots
    assert found.metrics["kept"] == found.metrics["after_tps"] / found.metrics["before_tps"]
    assert "no snapshot was taken" in found.notes[0]
    assert found.checks == []


def test_another_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="no variant 'buffered'"):
        oltp.scenario.parameters(Parameters(**{**vars(_GIVEN), "variant": "buffered"}))


@pytest.mark.parametrize("variant", ["o_dsync", "fsync"])
def test_a_variant_through_the_page_cache_needs_data_that_it_does_not_hold(variant: str) -> None:
    given = {**vars(_GIVEN), "variant": variant}
    with pytest.raises(ConfigError, match="page cache"):
        oltp.scenario.parameters(Parameters(**given))
    assert oltp.scenario.parameters(Parameters(**{**given, "memory_bytes": 15 << 20})).variant == variant
    # By itself it takes as much as a bound memory does not hold.
    alone = oltp.scenario.parameters(Parameters(**{**given, "size_bytes": 0, "memory_bytes": 128 << 20}))
    assert alone.size_bytes > 128 << 20


def test_the_buffer_pool_fits_into_bounded_memory() -> None:
    given = {**vars(_GIVEN), "size_bytes": 1 << 30, "memory_bytes": 128 << 20}
    assert oltp.scenario.parameters(Parameters(**given)).extra["buffer_pool_bytes"] == 64 << 20


@pytest.mark.parametrize("stack", ["btrfs"])
def test_clients_are_added_beside_a_snapshot(stack: str) -> None:
    # More clients than the server lets in by default.
    given = replace(_GIVEN, extra={"threads": (1, 200), "warm_up_s": 1})
    parameters = oltp_threads.scenario.parameters(given)
    with scenario_bench(stack, parameters, _SIZE_BYTES) as bench:
        found = oltp_threads.scenario.run(bench)
        assert len(bench.inventory()) == 1
    assert set(found.metrics) == {metric.name for metric in oltp_threads.scenario.metrics}
    assert all(value > 0 for value in found.metrics.values())
    assert [len(values) for values in found.series.values()] == [2, 2]
    assert "with a snapshot" in found.notes[1]
