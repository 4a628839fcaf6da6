"""Two recordings beside each other: what is said to have changed, and their common axis of time."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from snapmgr.cli.main import main
from snapmgr.trace.accesslog import HEADER, TRAILER
from snapmgr.trace.analysis import analyse, facts_of
from snapmgr.trace.compare import Measure, Side, aligned, caveats, changed, measures
from snapmgr.trace.page import write_comparison
from snapmgr.trace.verdict import judge
from support.accesslog import read_blocks

GOLDEN = Path(__file__).parents[2] / "golden" / "trace"
STATS = 0x7FFF_FFFF_0000_0003


def side(lines):
    trace = read_blocks(lines)
    analysis = analyse(trace)
    return Side(trace=trace, analysis=analysis, verdict=judge(facts_of(trace, analysis)))


def recorded(name):
    return gzip.decompress((GOLDEN / f"{name}.log.gz").read_bytes()).splitlines(keepends=True)


def line(second, what):
    return b"2026.11.22 23:00:%02d.000000 [uid:0,gid:0,pid:7] %s\n" % (second, what)


def prepared(seconds, **changes):
    """A recording of so many reads of a second each, with counters."""
    header = {
        "volume": "vol1",
        "version": "1.4.2",
        "command": "mariadb-backup",
        "folder": "/jfs/full",
        "prepares": True,
        "thread": 1,
        "stats_inode": STATS,
        "writeback": False,
        "cache_bytes": 200 << 20,
        "max_uploads": 20,
        "counters": {"juicefs_uptime": 1, "juicefs_fuse_ops_total_read": 0},
    } | changes
    end = {"juicefs_uptime": 99, "juicefs_fuse_ops_total_read": seconds}
    end |= {"juicefs_object_request_durations_histogram_seconds_GET_total": 10 * seconds}
    reads = [line(1 + number, b"read (5,4096,0,9): (4096) - OK <0.990000>") for number in range(seconds)]
    trailer = TRAILER + json.dumps({"counters": end, "wall_s": float(seconds)}).encode() + b"\n"
    return side([HEADER + json.dumps(header).encode() + b"\n", *reads, trailer])


def test_what_changed_is_told_in_order():
    found = changed(prepared(50), prepared(10, writeback=True, upload_delay_s=3600.0))
    assert found[:4] == (
        "A took 50.0 s, B 10.0 s: B is 5.0 times as fast",
        "A: mariadb-backup on /jfs/full, volume vol1, JuiceFS 1.4.2; mounted with cache-size 200.0 MiB, max-uploads 20",
        "B: mariadb-backup on /jfs/full, volume vol1, JuiceFS 1.4.2; mounted with writeback, upload-delay 1 h, "
        "cache-size 200.0 MiB, max-uploads 20",
        "read: 49.5 s in A, 9.9 s in B (÷ 5.0)",
    )
    assert found[4].startswith("verdict on A: ")
    rows = {row.name: row for row in measures(prepared(50), prepared(10))}
    assert (rows["length"].change, rows["read: p50"].change, rows["GET: count"].change) == ("÷ 5.0", "same", "÷ 5.0")


def test_the_same_recording_twice_has_not_changed():
    one = side(recorded("phases"))
    assert {row.change for row in measures(one, one)} == {"same"}
    assert all(not text.startswith(("read:", "fsync:")) for text in changed(one, one))


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [(1.0, 2.5, "× 2.5"), (5.0, 1.0, "÷ 5.0"), (1.0, 1.05, "same"), (0, 3, "new"), (3, 0, "gone"), (None, 3, "")],
)
def test_a_change_is_told_relative_to_the_first(a, b, change):
    assert Measure(name="x", unit="s", a=a, b=b).change == change


def test_both_begin_at_0_and_nothing_of_one_is_taken_for_the_other():
    lines = recorded("phases")
    a, b = side(recorded("reads")), side(lines[: len(lines) // 5] + lines[len(lines) * 4 // 5 :])
    both, holes, drawn = aligned(a, b)
    assert drawn == []
    split = len(a.trace.operations)
    assert len(both) == split + len(b.trace.operations)
    for part in (range(split), range(split, len(both))):
        assert min(both.end_us[row] - both.duration_us[row] for row in part) == 0
    threads = [{both.threads[both.thread[row]][0] for row in part} for part in (range(split), range(split, len(both)))]
    assert threads == [{"A"}, {"B"}]
    files = {both.paths[inode] for inode in both.inode if inode}
    assert {"A: inode 2", "B: big"} <= files
    kinds = [both.names[kind] for kind in both.name]
    assert kinds[split:] == [b.trace.operations.names[kind] for kind in b.trace.operations.name]
    ((begin, end, name),) = holes
    assert (name, end - begin) == ("B", b.analysis.holes[0].to_us - b.analysis.holes[0].from_us)
    assert [caveat[:2] for caveat in caveats(a, b)] == ["A:", "B:", "B:"]


def test_the_page_has_both_and_what_changed():
    out = io.BytesIO()
    write_comparison(prepared(50), prepared(10, writeback=True), out, title="a and <b>")
    text = out.getvalue().decode()
    assert "B is 5.0 times as fast." in text
    assert '<table id="measures">' in text
    assert "a and &lt;b&gt;" in text


def test_the_command(capsys, tmp_path):
    page = tmp_path / "change.html"
    a, b = (str(GOLDEN / f"{name}.log.gz") for name in ("phases", "reads"))
    assert main(["trace", "compare", a, b, "-o", str(page)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("A took 1.6 s, B 599 ms: B is 2.6 times as fast\n")
    assert "fsync: count" in out
    assert "A: the file has no counters of the mount" in err
    assert "What changed" in page.read_text()
    assert main(["trace", "compare", a, b, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "trace compare"
    assert document["measures"][0] == {"name": "length", "unit": "s", "a": 1.57223, "b": 0.599247, "change": "÷ 2.6"}
    assert len(document["caveats"]) == 2
    assert main(["trace", "compare", a, str(tmp_path / "none")]) == 1
