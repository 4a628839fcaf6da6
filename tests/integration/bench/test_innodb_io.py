"""The model of InnoDB, small: on real file systems, and where a part of its mix does not take place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapmgr.bench.scenarios.innodb_io import scenario
from support.bench.device import bench_device
from support.bench.plain import PlainBench, completed
from support.thoroughness import CAMPAIGN

_MIB = 1 << 20

pytestmark = pytest.mark.needs("fio")


@pytest.mark.needs("root", "loop", "xfs", "ext4")
@pytest.mark.parametrize("stack", ["ext4-dioread-nolock", *(("ext4-dioread-lock", "ext4", "xfs") if CAMPAIGN else ())])
def test_sample_on_a_real_stack(stack):
    parameters = scenario.parameters(
        replace(completed(scenario), size_bytes=32 * _MIB, memory_bytes=16 * _MIB, extra={"threads": (1, 6)})
    )
    with bench_device() as device, device.bench(stack) as bench:
        bench.parameters = parameters
        outcome = scenario.run(bench)
    assert [check.name for check in outcome.checks if not check.ok] == []
    assert len(outcome.checks) == 4
    assert set(outcome.metrics) <= {info.name for info in scenario.metrics}
    for method in ("direct", "dsync"):
        assert outcome.metrics[f"iops_best_{method}"] > 0
        assert len(outcome.series[f"iops_by_threads_{method}"]) == 2
        assert outcome.axes[f"read_p99_by_threads_{method}"]["x"] == [1, 6]
        reads, writes = (outcome.series[f"{what}_by_threads_{method}"] for what in ("reads", "writes"))
        assert [*map(sum, zip(reads, writes, strict=True))] == pytest.approx(
            outcome.series[f"iops_by_threads_{method}"]
        )
    # Past the page cache every page reaches the device.
    assert outcome.metrics["written_per_byte_direct"] >= 0.95
    assert outcome.metrics["dsync_over_direct"] > 0
    assert "kernel" in outcome.notes[0]


def test_part_of_the_mix_that_is_missing_fails_the_sample(tmp_path):
    class _ExtendsElsewhere(PlainBench):
        def fio(self, name, sections):
            if name.startswith("direct"):
                sections = {**sections, "extend": {**sections["extend"], "thinktime": "1ms", "filename": "elsewhere"}}
            return super().fio(name, sections)

    parameters = scenario.parameters(replace(completed(scenario), size_bytes=8 * _MIB, extra={"threads": (1,)}))
    outcome = scenario.run(_ExtendsElsewhere(tmp_path, parameters))
    (check,) = outcome.checks
    assert not check.ok
    assert "extended to 16384 of" in check.detail
