"""What a tuning leaves: the page, the job's table, the command line, the document."""

from __future__ import annotations

import json
import re
import tomllib
from datetime import UTC, datetime
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.units import parse_duration, parse_size
from snapmgr.drawing.rungs import Bar, bars, timeline
from snapmgr.drawing.svg import nice_step
from snapmgr.physical.tuning.outcome import (
    PUBLISHED,
    arguments,
    document,
    job_table,
    lines,
    quickest_arguments,
    quickest_table,
    summary,
)
from snapmgr.physical.tuning.page import render
from snapmgr.physical.tuning.rungs import Run, RungSettings, TuningLimits
from snapmgr.physical.tuning.tune import Checked, Measured, Sample, ScratchRun, Stop, Tuning
from snapmgr.trace.counters import growth

MIB = 1 << 20
NOW = datetime(2026, 11, 22, 1, 0, tzinfo=UTC)
DEFAULT = RungSettings()
WRITEBACK = RungSettings(writeback=True)
BEST = RungSettings(writeback=True, cache_dir='/dev/shm/<odd> & "name"', use_memory_bytes=800 * MIB)


def sample(at_s, grown):
    return Sample(
        at_s=at_s,
        read_s=0.5 * grown,
        write_s=0.2 * grown,
        fsync_s=0.1 * grown,
        get_bytes=int(grown * 4 * MIB),
        put_bytes=int(grown * MIB),
        staged_bytes=int(at_s * MIB),
        cpu_s=grown,
    )


def run(settings, seconds, **changed):
    fields = {"cut": changed.pop("cut", False), "bottleneck": changed.pop("bottleneck", "upload")}
    return Measured(run=Run(settings=settings, seconds=seconds, **fields), tool_s=seconds, **changed)


def tuning(*, finished=True):
    limits = TuningLimits(data_bytes=2 << 30, memory_bytes=4 << 30, private=True)
    stats = {"juicefs_uptime": 9, "juicefs_object_request_durations_histogram_seconds_GET_total": 18_000}
    found = Tuning(
        name="backup of <b>nightly</b>",
        data_bytes=2 << 30,
        redo_bytes=128 * MIB,
        tool="mariadb-backup 10.11",
        limits=limits,
        time_s=1800,
        measured=[
            run(
                DEFAULT,
                107,
                samples=tuple(sample(i / 2, i) for i in range(200)),
                checked=Checked(tables={"`a`.`t`": "1"}),
                counted=growth({}, stats),
                verdict="reads took 90 s, and 29900 uploads of 16 KiB each",
                why="what all others are compared with",
            ),
            run(WRITEBACK, 45, samples=(sample(0.5, 1), sample(1, 2))),
            run(RungSettings(writeback=True, warm_up=True), 60, cut=True),
            run(RungSettings(writeback=True, max_uploads=150), 45, cut=True, failure="the tool said <no>"),
            run(BEST, 30),
            run(BEST, 33, checked=Checked(tables={"`a`.`t`": "1"})),
            run(BEST, 11, temperature="warm"),
        ],
        scratch=ScratchRun(copy_s=5, tool_s=2),
        stop=Stop(settings=BEST, why="nothing that is left gains more than the noise", exhausted=True),
        spent_s=400,
    )
    if not finished:
        found.stop = None
        del found.measured[2:]
    return found


class Outline(HTMLParser):
    """Opens and closes elements as a browser would, and refuses what does not match."""

    VOID = frozenset({"meta", "br", "line", "rect", "circle"})

    def __init__(self):
        super().__init__()
        self.open, self.text, self.resources = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.resources += [value for name, value in attrs if name in {"src", "href", "action"}]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("finished", [True, False])
def test_page_is_whole_and_self_contained(finished):
    page = render(tuning(finished=finished), source="/jfs/full", job="nightly", made_at=NOW)
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert outline.resources == []
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<script" not in page
    text = " ".join(outline.text)
    assert "backup of <b>nightly</b>" in text
    assert "<b>nightly" not in page
    assert ("It was ended before it was done" in text) is not finished
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(svg)  # noqa: S314 - our own


def test_quickest_way_is_the_one_to_paste():
    found = tuning()
    now = found.standing
    assert quickest_arguments(found, now.best) == ["--strategy", "scratch"]
    table = tomllib.loads(quickest_table(found, "nightly", now.best))
    assert table["job"]["nightly"]["prepare"] == {"strategy": "scratch"}
    text = render(found, source="/jfs/full", job="nightly", made_at=NOW)
    assert "snapmgr prepare /jfs/full --strategy scratch" in text
    assert "snapmgr prepare /jfs/full --strategy storage" in text
    # The memory that was measured is told too.
    found.start = RungSettings(use_memory_bytes=300 * MIB)
    assert quickest_arguments(found, now.best) == ["--strategy", "scratch", "--use-memory", "300M"]
    for scratch in (None, ScratchRun(copy_s=40, tool_s=2), ScratchRun(copy_s=1, tool_s=0, failure="no")):
        found.scratch = scratch
        assert quickest_arguments(found, now.best) == arguments(now.best)
        assert quickest_table(found, "nightly", now.best) == job_table("nightly", now.best)


def test_page_tells_what_was_measured():
    page = render(tuning(), source="/jfs/full", job=None, made_at=NOW)
    outline = Outline()
    outline.feed(page)
    text = re.sub(r"\s+", " ", " ".join(outline.text))
    assert "3.4×" in text
    assert "+ use-memory 800.0 MiB, + cache in /dev/shm/<odd>" in text
    assert "published: + cache 10 GB, on a faster disk" in text
    assert "7.0 s" in text
    assert "30.0, 33.0 11.0" in re.sub(r"\s+", " ", text)
    assert "The tables (1) are the same by checksum" in text
    assert "the tool said <no>" in text
    assert "snapmgr prepare /jfs/full --strategy storage --use-memory 800M --mount-option writeback" in text


def test_published_ladder_is_the_known_one():
    assert [seconds for _, seconds in PUBLISHED] == [62, 33, 23, 11.8, 11.2, 6.9]


settings = st.builds(
    RungSettings,
    use_memory_bytes=st.none() | st.integers(1, 1 << 40),
    flush_method=st.none() | st.just("fsync"),
    io_threads=st.none() | st.integers(1, 64),
    writeback=st.booleans(),
    upload_delay_s=st.sampled_from([0.0, 3600.0, 90.0]),
    cache_bytes=st.none() | st.integers(1, 1 << 40),
    cache_dir=st.none() | st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).map(lambda t: f"/{t}"),
    warm_up=st.booleans(),
    max_uploads=st.none() | st.integers(1, 1000),
    kernel_writeback=st.booleans(),
)


@given(settings, st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1))
def test_jobs_table_is_read_back_as_it_was(found, job):
    (table,) = tomllib.loads(job_table(job, found))["job"].values()
    read = table["prepare"]
    assert read["strategy"] == "storage"
    memory = read.get("use_memory")
    assert (parse_size(memory) if memory else None) == found.use_memory_bytes
    cache = read.get("cache_size")
    assert (parse_size(cache) if cache else None) == found.cache_bytes
    assert parse_duration(read.get("upload_delay", "0")) == found.upload_delay_s
    assert read.get("cache_dir") == found.cache_dir
    assert (read.get("writeback", False), read.get("warm_up", False)) == (found.writeback, found.warm_up)
    assert tuple(read.get("tool_options", ())) == found.tool_options()
    assert tuple(read.get("mount_options", ())) == found.client_options().extra


def test_arguments_for_a_shell():
    found = RungSettings(
        use_memory_bytes=1 << 30,
        upload_delay_s=3600,
        writeback=True,
        max_uploads=150,
        kernel_writeback=True,
        warm_up=True,
    )
    assert arguments(found) == [
        *("--strategy", "storage", "--use-memory", "1G"),
        *("--mount-option", "writeback", "--mount-option", "upload-delay=1h", "--mount-option", "warm-up"),
        *("--mount-option", "max-uploads=150", "--mount-option", "o=writeback_cache"),
    ]


def test_document_is_json_and_whole():
    found = json.loads(json.dumps(document(tuning()), allow_nan=False))
    assert found["speed_up"] == pytest.approx(107 / 31.5, rel=0.01)
    assert found["scratch"]["seconds"] == 7
    assert [one["temperature"] for one in found["runs"]].count("warm") == 1
    assert found["runs"][0]["counters"]["gets"] == 18_000
    assert found["finished"]


def test_summary_says_what_became_of_it():
    told = summary(tuning())
    assert told[0].startswith("3.4 times faster: 1 min 47 s with default, 31 s with ") or "times faster" in told[0]
    assert any("over local scratch it takes 7.0 s (copy 5.0 s, prepare 2.0 s)" in line for line in told)
    assert any("then it was ended" in line for line in summary(tuning(finished=False)))
    assert [row[0] for row in lines(tuning())][2:4] == ["> 1 min", "failed"]


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_round(most):
    step = nice_step(most)
    assert 1 <= most / step <= 10
    assert re.fullmatch(r"[125]e[+-]\d+", f"{step:.0e}")


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 1000)), max_size=8))
def test_timeline_stays_in_its_picture(steps):
    at_s, grown, samples = 0.0, 0.0, []
    for pause_s, more in steps:
        at_s, grown = at_s + pause_s, grown + more
        samples.append(sample(at_s, grown))
    picture = timeline(samples, title="a < b")
    if len(samples) < 2:
        assert not picture
        return
    root = ET.fromstring(picture)  # noqa: S314 - our own
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert -1 <= y <= height


def test_bars_bear_any_label():
    row = Bar(label="<script>alert(1)</script>" * 9, value=0, text="0", kind="tried", dots=(0.0, 3.0))
    root = ET.fromstring(bars([row], title='"', unit="s"))  # noqa: S314 - our own
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2
    assert not bars([], title="", unit="")
