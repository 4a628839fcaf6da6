"""The benchmark of prepares: which samples are missing, and what its table says of them."""

from __future__ import annotations

import pytest

from support.preparelab import samples
from support.preparelab.cells import WAYS, all_cells, client_options, guess_s, tool_options
from support.preparelab.samples import Sample

GIB = 1 << 30


def sample(way: str, seconds: float | None, cell: str = "1gbit/1ms/data1/redo1") -> Sample:
    return Sample(cell=cell, way=way, data_mib=512, redo_mib=64, seconds=seconds, failure="" if seconds else "why")


def test_every_combination_of_bandwidth_latency_data_and_redo_is_a_cell():
    ids = [cell.id for cell in all_cells()]
    assert len(set(ids)) == len(ids) == 17
    assert {tuple(name.split("/")) for name in ids} >= {
        (total, latency, data, redo)
        for total in ("1gbit", "10gbit")
        for latency in ("1ms", "15ms")
        for data in ("data1", "data4")
        for redo in ("redo1", "redo4")
    }
    paces = {cell.id: cell.pace for cell in all_cells()}
    assert paces["1gbit/15ms/data1/redo1"].total_bytes_s == 125_000_000
    assert paces["1gbit/15ms/data1/redo1"].get_latency_s == 0.015
    assert paces["nolimit/15ms/data4/redo2"].total_bytes_s == 0
    assert all(guess_s(cell, way, GIB, GIB // 16) > 5 for cell in all_cells() for way in WAYS)


def test_sizes_of_caches_and_memory_follow_the_backup():
    ways = {way.name: way for way in WAYS}
    assert client_options(ways["default"], 2 * GIB) == ("--cache-size", "204")
    assert client_options(ways["cache"], 2 * GIB) == ("--cache-size", "4096", "--writeback")
    # 32,768 pages of 16 KiB, and a half more.
    assert tool_options(ways["memory"], 2 * GIB, 128 << 20) == ("--use-memory=896M",)


def test_what_was_measured_is_not_measured_again_but_what_failed_is(tmp_path):
    file = tmp_path / "results"
    assert samples.read(file) == []
    for one in (sample("auto", 7.0), sample("auto", None), sample("auto", 9.0), sample("default", 70.0)):
        samples.append(file, one)
    with file.open("a") as out:
        out.write('{"cell": "cut off')
    found = samples.read(file)
    assert [one.seconds for one in found] == [7.0, None, 9.0, 70.0]
    assert samples.counts(found)["1gbit/1ms/data1/redo1", "auto", 512, 64] == 2


def test_the_table_has_medians_and_how_auto_compares():
    rows = [sample("default", 90.0), *(sample("auto", seconds) for seconds in (8.0, 12.0, 10.0))]
    rows += [sample("scratch", 8.0), sample("cache", None), sample("auto-storage", 1.0)]
    (row,) = samples.summary(rows)
    # A result elsewhere is no competitor.
    assert (row["auto_by_best"], row["default_by_auto"]) == (10 / 8, 9.0)
    header, _, line = samples.table(rows).splitlines()
    assert header.startswith("| Cell | Data, redo (MiB) | default | cache | scratch | auto | auto-storage |")
    assert line.endswith("| 90.0 | failed | 8.0 | 10.0 (8.0–12.0) | 1.0 | 1.25 | 9.00 |")


@pytest.mark.parametrize("rows", [[], [sample("auto", None)]])
def test_a_table_of_nothing_is_a_table(rows):
    assert samples.table(rows).startswith("| Cell |")
