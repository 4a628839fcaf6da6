"""The published experiments, repeated in a guest with a spinning disk: a reduced one, from its start to its table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.published import Repetition, blocks, figures, measure, pack, report, unpacked
from snapmgr.bench.results.samples import Results
from support.spinningdisk import Model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.needs("root", "user-mode-linux", "fio"), pytest.mark.timeout(300)]
# The pilot alone, one sample of each storage, unless this machine is so quick that a block fits as well.
_REDUCED = Repetition(
    name="reduced", scenario="random-update", variant="database", profile="smoke", size_bytes=16 << 20, budget_s=15
)


def test_a_reduced_one_is_measured_on_the_spinning_disk_and_packed(tmp_path: Path) -> None:
    folder = tmp_path / _REDUCED.name
    for budget_s in (_REDUCED.budget_s, 100, 200):
        # On a slow machine the second start goes on where the first one's budget ended.
        assert measure(replace(_REDUCED, budget_s=budget_s), tmp_path, 1) == 0
        if len(blocks(folder)[1]) > 1:
            break
    samples = Results(folder).samples()
    assert {one["stack"] for one in samples} == {"lvm+ext4", "btrfs"}
    for one in samples:
        assert one["failure"] == ""
        assert one["host"]["device"]["rotational"]
        assert one["host"]["target"]["identified_by"] == "device-mapper"
        # In memory it would be some GB/s.
        assert one["metrics"]["read_after_bytes_s"] < 1.1 * Model().bytes_s
    pack((_REDUCED,), tmp_path, tmp_path / "packed.tar.xz")
    assert sorted(one["id"] for one in unpacked(tmp_path / "packed.tar.xz")) == sorted(one["id"] for one in samples)
    assert report(samples)[0].startswith("| Experiment")
    assert figures(samples)[0].startswith("| Experiment")
