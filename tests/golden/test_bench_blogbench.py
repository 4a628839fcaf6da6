"""What blogbench prints. Its published table is the only real output that is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.api import CommandError, StorageError
from snapmgr.bench.load.blogbench import parse
from snapmgr.bench.load.blogrun import COMMENTED, READ, WRITTEN

LINES = (Path(__file__).parent / "bench/blogbench-lvm-after-snapshot.tsv").read_text().splitlines()
ROWS = [tuple(map(int, line.split())) for line in LINES if line[0].isdigit()]
HEAD = """
Frequency = 10 secs
Scratch dir = [/mnt/data]
Spawning 3 writers...
Spawning 1 rewriters...
Spawning 5 commenters...
Spawning 100 readers...
Benchmarking for 30 iterations.
The test will run during 5 minutes.

  Nb blogs   R articles    W articles    R pictures    W pictures    R comments    W comments
"""
SCORES = "\nFinal score for writes:           848\nFinal score for reads :         88398\n\n"


def row(values):
    # The formats of its printf calls.
    first, second, *rest = values
    return f"{first:10d} {second:12d} " + " ".join(f"{value:13d}" for value in rest) + "\n"


def printed(rows=ROWS, scores=SCORES):
    return HEAD + "".join(map(row, rows)) + scores


def test_published_table():
    run = parse(printed(), window_s=10)
    assert len(ROWS) == len(run.ends_s) == 30
    assert (run.writes, run.reads) == (848, 88398)
    assert run.ends_s[-1] == 300
    assert run.counts["blogs_written"][:3] == (351, 168, 2)
    assert sum(run.counts["blogs_written"]) == 848
    assert run.files(READ)[0] == 255030 + 222611 + 174246
    assert run.files(WRITTEN)[2] == 195 + 225
    assert run.files(COMMENTED)[2] == 486
    assert run.intervals(COMMENTED, 3)[:2] == (354 + 0 + 486, 0)


def test_published_stalls_are_found():
    stalls = parse(printed(), window_s=10).stalls()
    # Intervals 5 to 9, and later 23 to 25 and 28 to 30, as published; counted from the table itself.
    idle = [number for number, (_, *counts) in enumerate(ROWS, start=1) if not any(counts[1::2])]
    assert idle == [5, 6, 7, 8, 9, 11, 23, 24, 25, 28, 29, 30]
    assert stalls.without_write == len(idle)
    assert stalls.longest_write_s == 50
    assert (stalls.without_read, stalls.longest_read_s) == (7, 70)
    assert (stalls.without_either, stalls.longest_either_s) == (5, 40)


def test_errors_stand_before_a_row_without_an_end_of_line():
    text = printed().replace(row(ROWS[3]), "write(): Input/output error" + row(ROWS[3]))
    run = parse(text, window_s=10)
    assert len(run.ends_s) == 30
    assert run.counts["articles_read"][3] == 265205
    assert run.notes == ("blogbench told of errors and went on: Input/output error",)


def test_full_disk_is_no_stall():
    text = printed().replace(row(ROWS[3]), "write(): No space left on device" + row(ROWS[3]))
    with pytest.raises(StorageError, match="the disk was full"):
        parse(text, window_s=10)


@pytest.mark.parametrize("text", ["", HEAD, printed(scores=""), printed(rows=[]), "blogbench 1.1 - usage"])
def test_output_that_is_cut_short(text):
    with pytest.raises(CommandError, match="blogbench printed"):
        parse(text, window_s=10)
