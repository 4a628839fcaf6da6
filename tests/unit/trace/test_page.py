"""Lanes, the packing of operations into the page, the page itself, and the export for trace viewers."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import zlib
from array import array
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.cli.main import main
from snapmgr.trace.accesslog import Trace
from snapmgr.trace.analysis import analyse
from snapmgr.trace.lanes import lanes, starts_us
from snapmgr.trace.operations import Operations
from snapmgr.trace.page import write_page
from snapmgr.trace.page.packing import pack
from snapmgr.trace.perfetto import write_perfetto
from snapmgr.trace.verdict import Finding, Verdict
from support.operations import KERNEL, READER, WRITER, prepare_operations

GOLDEN = Path(__file__).parents[2] / "golden" / "trace" / "kinds.log"
_COLUMNS = ("start", "duration", "name", "file", "offset", "size", "got", "status")
_TYPES = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _operations(rows):
    made = Operations(names=["read", 'wr"ite'], statuses=["OK", "é\u2028"], paths={7: "a/b\n"})
    for end, lasted, thread, name, inode, size, offset, status in rows:
        for column, value in (("end_us", end), ("duration_us", lasted), ("thread", thread), ("name", name)):
            getattr(made, column).append(value)
        for column, value in (("inode", inode), ("size", size), ("offset", offset), ("got", size), ("status", status)):
            getattr(made, column).append(value)
    return made


_MANY = st.lists(
    st.tuples(
        # Close together, so that they overlap, and far apart.
        st.one_of(st.integers(1000, 1100), st.integers(0, 2**52)),
        st.one_of(st.integers(0, 60), st.integers(0, 2**40)),
        st.sampled_from((0, 1, 2**32 - 1)),
        st.sampled_from((0, 1)),
        st.sampled_from((0, 7, 2**64 - 1)),
        st.one_of(st.just(16384), st.integers(0, 2**33)),
        st.integers(0, 2**53 - 1),
        st.sampled_from((0, 1)),
    ),
    max_size=30,
).map(_operations)


def _unpack(text):
    """As unpack.js does it."""
    data = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(data[:4], "little")
    head, at, columns = json.loads(data[4 : 4 + length]), 4 + length, {}
    for name, width in head["columns"]:
        planes = [data[at + weight * head["count"] :][: head["count"]] for weight in range(width)]
        columns[name] = [int.from_bytes(digits, "little") for digits in zip(*planes, strict=True)]
        at += width * head["count"]
    assert at == len(data)
    return head, columns


@given(_MANY)
def test_each_operation_is_in_one_lane_of_its_thread_and_none_overlap(operations):
    starts, found = starts_us(operations), lanes(operations)
    assert sorted(row for lane in found for row in lane.rows) == list(range(len(operations)))
    for lane in found:
        assert {operations.thread[row] for row in lane.rows} == {lane.thread}
        ends = [0, *(operations.end_us[row] for row in lane.rows)]
        assert all(starts[row] >= end for row, end in zip(lane.rows, ends, strict=False))
    numbers = {}
    for lane in found:
        assert numbers.setdefault(lane.thread, 0) == lane.number, "a thread's lanes lie together, in their order"
        numbers[lane.thread] += 1


def test_a_thread_that_waits_has_one_lane_and_the_kernel_as_many_as_it_had_under_way():
    operations = prepare_operations(3000)
    found = {(lane.thread, lane.number) for lane in lanes(operations)}
    assert {(READER, 0), (WRITER, 0), (KERNEL, 0), (KERNEL, 1)} <= found
    assert not {(READER, 1), (WRITER, 1)} & found


def test_the_busiest_thread_comes_first():
    found = lanes(_operations([(10, 1, 5, 0, 0, 0, 0, 0), (20, 9, 6, 0, 0, 0, 0, 0), (10, 1, 4, 0, 0, 0, 0, 0)]))
    assert [lane.thread for lane in found] == [6, 4, 5]


@given(_MANY)
def test_packed_operations_are_the_same_when_unpacked(operations):
    head, columns = _unpack(pack(operations))
    assert list(columns) == list(_COLUMNS)
    assert (head["names"], head["statuses"]) == (operations.names, operations.statuses)
    starts, row = starts_us(operations), 0
    seen = []
    for thread, _, count in head["lanes"]:
        time = head["origin_us"]
        for here in range(row, row + count):
            time += columns["start"][here]
            inode, path = head["files"][columns["file"][here]]
            assert path == operations.paths.get(int(inode), "")
            rest = tuple(columns[name][here] for name in ("duration", "name", "offset", "size", "got", "status"))
            seen.append((time, thread, int(inode), *rest))
        row += count
    wanted = [
        (
            starts[i], operations.thread[i], operations.inode[i], operations.end_us[i] - starts[i], operations.name[i],
            operations.offset[i], operations.size[i], operations.got[i], operations.status[i],
        )
        for i in range(len(operations))
    ]  # fmt: skip
    assert sorted(seen) == sorted(wanted)


def test_numbers_beyond_what_javascript_counts_are_cut_there():
    operations = _operations([(100, 1, 1, 0, 7, 1, 2**64 - 1, 0)])
    assert _unpack(pack(operations))[1]["offset"] == [2**53 - 1]


def test_an_operation_takes_some_eight_bytes_of_the_page():
    operations = prepare_operations(20_000)
    assert len(pack(operations)) / len(operations) < 12


class _Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.void, self.addresses, self.text = [], {"meta", "link", "input"}, [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in {"src", "href", "action"}]
        assert not [name for name, _ in attributes if name.startswith("on")], "the policy forbids handlers in tags"
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


def _page(operations, verdict=None, title="JuiceFS"):
    out, trace = io.BytesIO(), Trace(operations=operations)
    write_page(trace, out, analysis=analyse(trace), verdict=verdict, title=title)
    return out.getvalue().decode()


def test_the_page_asks_for_nothing_and_what_the_log_says_stays_text():
    evil = '</script><img src=x onerror="alert(1)">'
    operations = _operations([(100, 1, 1, 0, 7, 1, 0, 0)])
    operations.paths[7], operations.names[0], operations.skipped = evil, evil, 3
    finding = Finding(bottleneck="fsync", why=evil, action="use-memory", advice="<more> memory")
    tags = _Tags(_page(operations, Verdict(findings=(finding,)), title=evil))
    assert tags.open == []
    assert tags.addresses == ["data:,"]
    assert tags.text.count(evil) == 3, "twice in titles, once in the verdict"
    assert "Try: <more> memory." in tags.text
    assert "3 lines are not from a JuiceFS log and were skipped" in tags.text


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else():
    text = _page(prepare_operations(50))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy or f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_names_that_are_no_text_are_shown_as_far_as_they_are():
    operations = _operations([(100, 1, 1, 0, 7, 1, 0, 0)])
    operations.paths[7] = "\udcff"
    text = _page(operations, title="a\udcff.log")
    assert "<h1>a?.log</h1>" in text
    head, _ = _unpack(re.search(r'id="data">([^<]*)<', text)[1])
    assert head["files"] == [["7", "\udcff"]]


def test_a_page_without_verdict_and_operations_is_a_page():
    text = _page(Operations())
    assert 'id="verdict-title"' not in text
    assert "could not be read" not in text
    assert _Tags(text).open == []


@given(_MANY)
def test_events_for_viewers_hold_every_operation_and_never_overlap_in_a_thread(operations):
    out = io.BytesIO()
    write_perfetto(operations, out, title='a"b')
    document = json.loads(out.getvalue())
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(operations) == document["otherData"]["operations"]
    starts = starts_us(operations)
    origin = min(starts, default=0)
    real = {
        event["tid"]: int(event["args"]["name"].split()[1].rstrip(","))
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    seen = sorted((event["ts"] + origin, event["dur"], real[event["tid"]], event["name"]) for event in events)
    assert seen == sorted(
        (starts[i], operations.end_us[i] - starts[i], operations.thread[i], operations.names[operations.name[i]])
        for i in range(len(operations))
    )
    free_from = dict.fromkeys(real, 0)
    for event in events:
        assert event["ts"] >= free_from[event["tid"]]
        free_from[event["tid"]] = event["ts"] + event["dur"]
        assert event["pid"] == 1


def test_an_event_tells_file_offset_size_and_error():
    operations = _operations([(5_000_100, 40, 9, 1, 7, 512, 4096, 1), (5_000_300, 40, 9, 0, 0, 0, 0, 0)])
    out = io.BytesIO()
    write_perfetto(operations, out)
    document = json.loads(out.getvalue())
    first, second = (event for event in document["traceEvents"] if event["ph"] == "X")
    assert first["args"] == {
        "inode": 7, "file": "a/b\n", "offset": 4096, "size": 512, "got": 512, "status": "é\u2028"
    }  # fmt: skip
    assert (first["name"], first["ts"], first["dur"]) == ('wr"ite', 0, 40)
    assert (second["ts"], second["args"]) == (200, {})
    assert document["otherData"]["started"] == "1970-01-01T00:00:05.000060"


class _Counting(io.RawIOBase):
    def __init__(self):
        self.largest = 0

    def writable(self):
        return True

    def write(self, data):
        self.largest = max(self.largest, len(data))
        return len(data)


def test_events_are_written_piece_by_piece_also_into_gzip(tmp_path):
    operations = prepare_operations(20_000)
    out = _Counting()
    write_perfetto(operations, out)
    assert 0 < out.largest < 600_000
    with gzip.open(tmp_path / "trace.json.gz", "wb") as file:
        write_perfetto(operations, file)
    with gzip.open(tmp_path / "trace.json.gz") as file:
        assert len(json.load(file)["traceEvents"]) > 20_000


def test_the_generator_makes_rows_in_the_order_of_a_log():
    operations = prepare_operations(2000)
    assert len(operations) == 2000
    assert list(operations.end_us) == sorted(operations.end_us)
    assert isinstance(operations.end_us, array)


def test_trace_show_writes_page_and_events_of_a_recorded_log(tmp_path, capsys):
    page, events = tmp_path / "run.html", tmp_path / "run.json.gz"
    assert main(["trace", "show", str(GOLDEN), "-o", str(page), "--perfetto", str(events)]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    text = page.read_text()
    assert "<title>kinds.log: " in text
    assert 'id="verdict-title"' in text
    with gzip.open(events) as file:
        written = {event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "juicefs"}
    head, _ = _unpack(re.search(r'id="data">([^<]*)<', text)[1])
    assert written == set(head["names"]) >= {"read", "write", "fsync"}


@pytest.mark.parametrize("option", ["-o", "--perfetto"])
def test_trace_show_replaces_no_recording(option, tmp_path, capsys):
    log = tmp_path / "kinds.log"
    log.write_bytes(GOLDEN.read_bytes())
    assert main(["trace", "show", str(log), option, str(log)]) == 2
    assert "ends with neither" in capsys.readouterr().err
    assert log.read_bytes() == GOLDEN.read_bytes()
