"""Logs of real clients: one of each kind of operation by version 1.4.2, and the forms of older clients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from snapmgr.trace.reading import read_trace

GOLDEN = Path(__file__).with_name("trace")


def rows(operations):
    return [
        (
            operations.names[operations.name[at]],
            operations.duration_us[at],
            operations.thread[at],
            operations.inode[at],
            operations.size[at],
            operations.offset[at],
            operations.got[at],
            operations.statuses[operations.status[at]],
        )
        for at in range(len(operations))
    ]


def test_every_kind_of_operation():
    operations = read_trace(str(GOLDEN / "kinds.log")).operations
    assert operations.skipped == 0
    found = rows(operations)
    assert ("write", 122, 32283, 3, 131072, 131072, 131072, "OK") in found
    assert ("read", 1233, 32283, 3, 131072, 0, 131072, "OK") in found
    # A file that the client invents writes its result without brackets.
    assert ("read", 3, 32282, 9223372032559808515, 98304, 0, 4117, "OK") in found
    assert ("rmdir", 385, 32283, 1, 0, 0, 0, "directory not empty") in found
    assert operations.end_us[0] == 1795304877_505875
    # Renamed from "a b (x) - OK <0.1>"; its second name, by link, is not taken for it.
    assert operations.paths[3] == "d/r"
    assert operations.paths[4] == r"d/n\nl\xff,x"
    assert operations.paths[9223372032559808515] == ".stats"


def test_the_sums_are_those_of_juicefs_profile():
    operations = read_trace(str(GOLDEN / "kinds.log")).operations
    counts, totals_us = Counter(), Counter()
    for name, duration_us in zip(operations.name, operations.duration_us, strict=True):
        counts[operations.names[name]] += 1
        totals_us[operations.names[name]] += duration_us
    profile = [line.split() for line in (GOLDEN / "kinds.profile").read_text().splitlines()[1:]]
    assert {name: int(count) for name, count, *_ in profile} == counts
    # It rounds each time down from a float.
    assert all(0 <= totals_us[name] - int(total) <= counts[name] for name, _, _, total, _ in profile)
    assert len(profile) == 27


def test_the_form_before_1_4():
    operations = read_trace(str(GOLDEN / "older.log")).operations
    assert operations.skipped == 0
    assert rows(operations) == [
        ("write", 10, 4403, 17669, 8666, 4993160, 8666, "OK"),
        ("read", 12000, 4403, 17669, 131072, 8192, 4096, "OK"),
        ("lookup", 321, 4404, 1, 0, 0, 0, "OK"),
        ("lookup", 120, 4404, 17670, 0, 0, 0, "no such file or directory"),
        ("create", 1100, 4404, 17670, 0, 0, 0, "OK"),
        ("rename", 900, 4404, 17670, 0, 0, 0, "OK"),
        ("readlink", 50, 4404, 17672, 0, 0, 0, "OK"),
        ("flush", 2000, 4404, 17671, 0, 0, 0, "OK"),
        ("read", 60_250_000, 4404, 17671, 4096, 0, 0, "input/output error"),
    ]
    assert operations.paths[17671] == "shop (old): OK/t2.ibd"


def test_the_oplog_of_the_cloud_client():
    operations = read_trace(str(GOLDEN / "cloud.oplog")).operations
    assert (operations.skipped, operations.untimed) == (0, 2)
    found = rows(operations)
    assert found[1] == ("read", 1047, 0, 3859, 69632, 1439510528, 69632, "OK")
    assert [row[0] for row in found] == ["open", "read", "getattr", "setattr", "create", "write", "unlink", "flush"]
    assert {row[7] for row in found} == {"OK"}
    assert operations.paths[3861] == ".t.swp"
    # What bears no time is put behind what was before it.
    assert operations.end_us[7] - operations.end_us[5] == 11033 + 30459


@pytest.mark.parametrize("name", ["kinds.log", "older.log", "cloud.oplog"])
def test_other_ends_of_lines_change_nothing(name, tmp_path):
    plain = (GOLDEN / name).read_bytes()
    (tmp_path / "log").write_bytes(plain.replace(b"\n", b"\r\n"))
    assert read_trace(str(tmp_path / "log")) == read_trace(str(GOLDEN / name))
