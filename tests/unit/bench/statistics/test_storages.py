"""One row for each storage: what it promises, and what it costs."""

from __future__ import annotations

from snapmgr.bench.statistics.findings import findings
from snapmgr.bench.statistics.storages import storage_rows
from support.bench.samples import random_updates

PROMISED = {"atomicity": "volume", "clone": "native", "survives_origin": True}
COPIES = {"atomicity": "file", "clone": "native", "survives_origin": True}


def test_a_row_has_guarantee_lock_call_and_costs_against_the_control():
    known = {"btrfs": PROMISED, "xfs-reflink": COPIES}
    samples = [{**one, "guarantee": known.get(one["stack"])} for one in random_updates()]
    rows = storage_rows(samples, findings(samples, seed=1).found, controls=("xfs", "ext4"))
    assert [(row.stack, row.lock, row.control) for row in rows] == [
        ("btrfs", "short", False),
        ("xfs-reflink", "frozen", False),
        ("lvm-thin+xfs", None, False),
        ("ext4", None, True),
    ]
    btrfs, ext4 = rows[0], rows[-1]
    assert 0.008 < btrfs.create_s < 0.016
    assert (btrfs.writes.metric.name, btrfs.writes.against) == ("update_first_s", "ext4")
    assert 1.8 < btrfs.writes.ratio.value < 2.4
    assert (btrfs.reads.metric.name, btrfs.reads.verdict) == ("read_after_bytes_s", "worse")
    assert (ext4.create_s, ext4.guarantee, ext4.writes, ext4.reads) == (None, None, None, None)


def test_without_a_control_there_is_no_cost_and_failed_samples_give_no_row():
    samples = [one for one in random_updates() if one["stack"] != "ext4"]
    samples = [{**one, "failure": "lost"} if one["stack"] == "btrfs" else one for one in samples]
    rows = storage_rows(samples, findings(samples, seed=1).found, controls=("ext4",))
    assert [(row.stack, row.writes) for row in rows] == [("xfs-reflink", None), ("lvm-thin+xfs", None)]
