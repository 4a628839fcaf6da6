"""The report: its document, its page, its rows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from snapmgr.bench.report import COLUMNS, document, pictures, render, rows
from snapmgr.bench.report.figures import (
    common_title,
    curves,
    families,
    layouts,
    metric_table,
    moment_titles,
    spread,
    timelines,
)
from snapmgr.bench.statistics.comparison import difference_words, interval_words, number_words
from snapmgr.bench.statistics.ratio import Ratio
from snapmgr.bench.storage.stacks import STACKS
from support.bench.samples import HOST, absent, blogs, info, random_updates, sample

NOW = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
LOOP = {**HOST, "device": {"kind": "loop", "name": "loop3", "size_bytes": 1 << 30, "loop": {"on": [HOST["device"]]}}}
HOSTILE = '<script>alert(1)</script> & "x" {{ 7 * 7 }} </style></svg>'
WHY = "redis-server is not installed (apt install redis-server)"


@cache
def whole():
    """A document of two scenarios, with all that can be in one."""
    failed = sample(7777, "random-update", "btrfs", variant="database", block=99, failure="the disk was full")
    wrong = [{"name": "snapshot holds the old data", "ok": False, "detail": "checksum differs"}]
    unproven = sample(7778, "blog", "btrfs", block=99, checks=wrong)
    samples = [*random_updates(), *blogs(), absent("random-update", "juicefs", WHY), failed, unproven]
    runs = [{"id": "run-1", "at": "2026-11-22T02:00:00Z", "arguments": {"profile": "quick"}, "seed": 1, "versions": {}}]
    return document(samples, made_at=NOW, runs=runs, questions={"blog": "Does it stall?"})


@cache
def page():
    return render(whole())


class Outline(HTMLParser):
    """Opens and closes elements as a browser would, refuses what does not match, and notes what it meets."""

    VOID = frozenset({"meta", "link", "br", "line", "rect", "circle"})

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.met = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.met.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.met.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, *tags):
        return [(tag, attrs) for tag, attrs in self.met if tag in tags]

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def scenario(found, name):
    (one,) = (each for each in found["scenarios"] if each["name"] == name)
    return one


def test_the_document_is_json_and_the_same_for_the_same_samples():
    again = document(random_updates(blocks=6), made_at=NOW)
    assert document(random_updates(blocks=6), made_at=NOW) == again
    assert json.loads(json.dumps(whole(), allow_nan=False)) == whole()


def test_ratios_are_drawn_against_a_control_and_all_pairs_are_there():
    found = scenario(whole(), "random-update database")
    assert found["baseline"] == "ext4"
    drawn = [(one["stack"], one["against"]) for one in found["ratios"] if one["drawn"]]
    assert drawn == [(stack, "ext4") for stack in ("btrfs", "xfs-reflink", "lvm-thin+xfs")] * 2
    assert len(found["ratios"]) == 2 * 6
    update = found["ratios"][0]
    assert (update["metric"], update["kind"], update["n"]) == ("update_first_s", "worse", 8)
    assert update["low"] < 2.1 < update["high"]
    assert 1 <= update["noise"]["limit"] < 1.2
    assert update["noise"]["n"] == 8
    assert update["words"].endswith(": worse")


def test_a_point_is_in_the_grey_band_exactly_if_the_verdict_says_that_it_shows_nothing():
    """The chart and the text judge by one rule, on machines so noisy that the A/A pairs' interval holds most ratios."""
    seen = Counter()
    for seed in range(1, 9):
        found = document(random_updates(blocks=10, noise=0.35, seed=seed), made_at=NOW)
        one = scenario(found, "random-update database")
        picture = ET.fromstring(re.findall(r"<svg.*?</svg>", pictures.ratios(one, found["labels"]))[0])  # noqa: S314 - our own
        bands = [each for each in picture.iter() if each.get("class") == "noise"]
        points = [each for each in picture.iter() if (each.get("class") or "").startswith("point ")]
        drawn = [row for row in one["ratios"] if row["drawn"]]
        for band, metric in zip(bands, dict.fromkeys(row["metric"] for row in drawn), strict=True):
            low = float(band.get("x"))
            high = low + float(band.get("width"))
            for row in [row for row in drawn if row["metric"] == metric]:
                inside = low <= float(points.pop(0).get("cx")) <= high
                assert (row["verdict"] != "not shown") == (row["shown"] and not inside), row["words"]
                within = row["noise"]["low"] < row["value"] < (row["noise"]["high"] or math.inf)
                seen[row["verdict"], inside, within] += 1
            points.pop(0)  # the A/A pairs themselves
        assert points == []
    assert seen["worse", False, True], "a verdict in spite of an A/A interval that holds the ratio"
    assert any(inside for _, inside, _ in seen)


def test_the_stack_that_was_asked_for_first_is_what_others_are_drawn_against():
    runs = [{"id": "run-1", "at": "", "arguments": {"stacks": ["xfs-reflink", "btrfs"]}}]
    found = document(random_updates(blocks=6), made_at=NOW, runs=runs)["scenarios"][0]
    assert found["baseline"] == "xfs-reflink"
    assert {one["against"] for one in found["ratios"] if one["drawn"]} == {"xfs-reflink"}


def test_each_sentence_links_to_rows_that_exist():
    outline = Outline(page())
    ids = Counter(attrs["id"] for _, attrs in outline.met if attrs.get("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    links = [attrs["href"] for _, attrs in outline.all("a")]
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    evidence = [one["evidence"] for one in whole()["recommendation"]["sentences"]]
    assert sum(map(len, evidence)) > 5
    known = {one["id"]: one["anchor"] for each in whole()["scenarios"] for one in each["ratios"]}
    assert {f"#{known[name]}" for names in evidence for name in names} <= set(links)


def test_before_and_after_are_compared_within_a_stack():
    found = scenario(whole(), "random-update database")
    update = next(one for one in found["moments"] if one["metrics"] == ["update_first_s", "update_second_s"])
    assert update["moments"] == ["first pass after the snapshot", "second pass"]
    kinds = {row["stack"]: row["bars"][1]["kind"] for row in update["rows"]}
    assert kinds == {"btrfs": "better", "xfs-reflink": "better", "lvm-thin+xfs": "better", "ext4": "same"}
    read = next(one for one in found["moments"] if "read_after_bytes_s" in one["metrics"])
    assert next(row for row in read["rows"] if row["stack"] == "btrfs")["bars"][1]["kind"] == "worse"
    assert read["title"] == "Linear read, cold"


def test_stalls_are_counted_in_all_samples_and_shown_in_one():
    found = scenario(whole(), "blog")
    stalled = next(row for row in found["timelines"] if row["stack"] == "lvm+ext4")
    assert stalled["n"] == 6
    reads = next(lane for lane in stalled["lanes"] if lane["title"] == "Files reads")
    assert [moment["moment"] for moment in reads["moments"]] == ["before the snapshot", "after the snapshot"]
    assert [moment["idle"] for moment in reads["moments"]] == [[0] * 6, [9] * 6]
    assert found["question"] == "Does it stall?"


def test_the_advice_for_each_use_and_a_table_of_all_storages_come_first():
    promise = {"atomicity": "file", "clone": "native", "survives_origin": True}
    made = [{**one, "guarantee": promise if one["stack"] == "xfs-reflink" else None} for one in random_updates()]
    found = document([*made, *blogs()], made_at=NOW)
    outline = Outline(render(found))
    first = outline.words.partition("Storage against storage")[0]
    for words in (
        *("A database with snapshots", "A server with many small files", "What to avoid, and why", "How sure this is"),
        *("xfs-reflink each file to be frozen or stopped", "ext4, no snapshots ext4 no snapshots – –"),
    ):
        assert words in first, words
    sections = [attrs.get("id") for tag, attrs in outline.met if tag == "section"]
    assert sections[:2] == ["recommendation", "storages"]
    cost = next(one for one in found["recommendation"]["storages"] if one["stack"] == "btrfs")["writes"]
    assert f"{cost['cost_text']} Random update, first pass after the snapshot" in first


def test_people_read_labels_and_programs_names():
    found = document(random_updates(blocks=6), made_at=NOW, labels={"random-update": "Random updates after a snapshot"})
    assert found["labels"]["xfs-reflink"] == "XFS, reflink copies"
    outline = Outline(render(found))
    assert "Random updates after a snapshot (database)" in outline.words
    assert "XFS, reflink copies ÷ ext4, no snapshots" in outline.words
    assert found["scenarios"][0]["stacks"] == ["btrfs", "xfs-reflink", "lvm-thin+xfs", "ext4"]
    labels = [stack.label for stack in STACKS.values()]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) <= 24, "a chart has no more room"


def test_what_failed_and_what_could_not_run_is_listed_and_counts_for_nothing():
    assert whole()["absent"] == [{"scenario": "random-update", "stack": "juicefs", "reason": WHY}]
    assert {one["id"]: one["reason"] for one in whole()["failed"]} == {
        "7777-random-update-btrfs": "the disk was full",
        "7778-blog-btrfs": "snapshot holds the old data: checksum differs",
    }
    cells = scenario(whole(), "random-update database")["metrics"][0]["cells"]
    assert {cell["stack"]: cell["n"] for cell in cells} == dict.fromkeys(
        ("btrfs", "xfs-reflink", "lvm-thin+xfs", "ext4"), 8
    )
    assert WHY in Outline(page()).words


def levels(found):
    return {(one["level"], one["text"].split(":")[0].split("(")[0].strip()) for one in found["warnings"]}


def test_a_loop_device_is_said_before_anything_and_carries_no_advice():
    found = document([{**one, "host": LOOP} for one in random_updates()], made_at=NOW)
    assert ("alarm", "Measured on a loop device") in levels(found)
    assert found["recommendation"]["chosen"] is None
    lead = found["recommendation"]["sentences"][0]["text"]
    assert lead.startswith("Indicative, for a database with snapshots: 1. xfs-reflink; 2. lvm-thin+xfs; 3. btrfs. ")
    assert "No advice: the target is a loop device" in lead
    (use,) = found["recommendation"]["uses"]
    assert (use["use"], use["sure"], use["order"]) == (
        "oltp",
        "indicative",
        [["xfs-reflink"], ["lvm-thin+xfs"], ["btrfs"]],
    )
    assert "a loop device" in found["subtitle"]


def test_machines_sizes_and_files_that_do_not_fit_together_are_said():
    samples = random_updates(blocks=6)
    samples[0] = {**samples[0], "host": {**HOST, "kernel": "5.4.0"}}
    samples[1] = {**samples[1], "parameters": {**samples[1]["parameters"], "size_bytes": 1}}
    found = document(samples, made_at=NOW, problems=["/x/0001-y.json is damaged: it has no schema"])
    told = " ".join(one["text"] for one in found["warnings"] if one["level"] == "alarm")
    assert "machines, or from states of one, that differ" in told
    assert "2 different sizes or settings" in told
    assert "Not read: /x/0001-y.json is damaged" in told
    assert len(found["hosts"]) == 2
    assert found["recommendation"]["chosen"] is None
    assert found["recommendation"]["sentences"][0]["text"].startswith("No advice: the samples come from machines")


def test_absent_samples_are_no_machine_of_their_own():
    steady = {**HOST, "steady": None}
    samples = [{**one, "host": steady} for one in random_updates()]
    found = document([*samples, {**absent("random-update", "lvm+ext4", "no lvm"), "host": HOST}], made_at=NOW)
    assert [host["n"] for host in found["hosts"]] == [len(samples)]
    assert "that differ" not in json.dumps(found["warnings"])


def test_a_scenario_that_a_control_cannot_run_withholds_no_advice():
    """As `bench run` writes it on a disk: snapshot-ops does not run on ext4."""
    samples = [*random_updates(), absent("snapshot-ops", "ext4", "it has no snapshots")]
    found = document(samples, made_at=NOW)["recommendation"]
    assert found["chosen"] == "xfs-reflink"
    assert found["uses"][0]["sure"] == "shown"
    assert not any("ext4: it has" in one["text"] for one in found["sentences"])


def _keys(value):
    """All keys in a part of the document, without what belongs to samples, to charts, or to the machine."""
    if isinstance(value, list):
        return {key for one in value for key in _keys(one)}
    if not isinstance(value, dict):
        return set()
    free = {"labels", "parameters", "facts", "runs", "provisioned", "moments", "curves", "timelines", "layouts"}
    return value.keys() | {key for name, one in value.items() if name not in free for key in _keys(one)}


def test_each_key_of_the_document_is_explained():
    guarantee = {"atomicity": "file", "clone": "native", "survives_origin": True}
    samples = [{**one, "guarantee": guarantee} for one in [*random_updates(), *blogs()]]
    found = whole() | {"recommendation": document(samples, made_at=NOW)["recommendation"]}
    text = (Path(__file__).parents[4] / "docs" / "reference" / "json.md").read_text()
    section = text.partition("\n## bench\n")[2].partition("\n## ")[0]
    assert _keys(found) - set(re.findall(r"`([a-z_]+)`", section)) == set()
    assert {"problems", "cost_text", "survives_origin"} <= _keys(found)


def test_a_storage_without_snapshots_is_not_missed_where_only_their_operations_were_measured():
    samples = [{**one, "scenario": "snapshot-ops"} for one in random_updates() if one["stack"] != "ext4"]
    why = "it has no snapshots"
    missed = [absent("snapshot-ops", "ext4", why), absent("snapshot-ops", "lvm+ext4", "no device-mapper")]
    found = document([*samples, *missed], made_at=NOW)
    told = [one["text"] for one in found["recommendation"]["sentences"] if "Not compared" in one["text"]]
    assert told == ["Not compared: lvm+ext4: no device-mapper"]
    # It was requested: the list of what was not measured answers.
    assert {"scenario": "snapshot-ops", "stack": "ext4", "reason": why} in found["absent"]


def test_what_a_boot_changes_makes_no_other_machine():
    samples = random_updates(blocks=6)
    same = {"memory_bytes": 25_276_502_016, "target": {"kind": "device", "allocated_bytes": 4096, "marked": False}}
    for place, one in enumerate(samples):
        samples[place] = {**one, "host": {**HOST, **same}}
    kept = {"memory_bytes": 25_270_000_000, "target": {"kind": "device", "allocated_bytes": 8192, "marked": True}}
    samples[0] = {**samples[0], "host": {**HOST, **kept}}
    assert len(document(samples, made_at=NOW)["hosts"]) == 1
    samples[0] = {**samples[0], "host": {**HOST, **same, "memory_bytes": 12_638_251_008}}
    assert len(document(samples, made_at=NOW)["hosts"]) == 2


def test_notes_that_differ_in_the_samples_folder_alone_are_one():
    made = random_updates(blocks=6)
    for number, one in enumerate(made):
        one["notes"] = [
            f"the load: python -P --file=/tmp/bench-{number}/mount/load --rate 40",
            "the storage's own call is: '/usr/sbin/lvcreate'",
            f"{number % 2} of 2 were late",
        ]
    told = document(made, made_at=NOW)["scenarios"][0]["notes"]
    counted = sum(1 for one in made if one["kind"] == "measured")
    assert [(one["text"], one["n"]) for one in told[:2]] == [
        ("the load: python -P --file=…/load --rate 40", counted),
        ("the storage's own call is: '/usr/sbin/lvcreate'", counted),
    ]
    assert {one["text"] for one in told[2:]} == {"0 of 2 were late", "1 of 2 were late"}
    assert set(told[0]["stacks"]) == {"btrfs", "xfs-reflink", "lvm-thin+xfs", "ext4"}


def test_a_storage_that_failed_now_and_then_is_not_recommended():
    samples = random_updates()
    chosen = document(samples, made_at=NOW)["recommendation"]["chosen"]
    assert chosen
    place = next(place for place, one in enumerate(samples) if one["stack"] == chosen and one["kind"] == "measured")
    samples[place] = {
        **samples[place],
        "checks": [{"name": "the snapshot holds the old data", "ok": False, "detail": ""}],
    }
    made = sum(1 for one in samples if one["stack"] == chosen)
    told = document(samples, made_at=NOW)["recommendation"]
    assert told["chosen"] is None
    why = f"1 of {made} samples failed, at last with: the snapshot holds the old data: not so"
    assert told["sentences"][0]["text"] == f"No advice: {chosen} leads where it was measured, but {why}."


def test_a_seed_alone_makes_no_other_parameters():
    samples = [
        {**one, "parameters": {**one["parameters"], "seed": number}}
        for number, one in enumerate(random_updates(blocks=6))
    ]
    assert "different sizes" not in json.dumps(document(samples, made_at=NOW)["warnings"])


def test_the_page_is_whole_and_needs_nothing_else():
    outline = Outline(page())
    assert [attrs.get("src") for _, attrs in outline.met if attrs.get("src")] == []
    assert [attrs["href"] for _, attrs in outline.all("link")] == ["data:,"]
    assert "http" not in page().replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<script" not in page()
    assert "url(" not in page()


def test_headings_are_in_order_and_tables_are_told():
    outline = Outline(page())
    depths = [int(tag[1]) for tag, _ in outline.all("h1", "h2", "h3", "h4")]
    assert depths[0] == 1
    assert depths.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(depths))
    assert len(outline.all("caption")) == len(outline.all("table")) > 10
    assert all(attrs.get("scope") for _, attrs in outline.all("th"))


def test_each_picture_has_its_name_and_its_description():
    pictures = re.findall(r"<svg.*?</svg>", page(), flags=re.DOTALL)
    assert len(pictures) > 15
    for picture in pictures:
        root = ET.fromstring(picture)  # noqa: S314 - our own
        named = {one.get("id"): (one.text or "").strip() for one in root}
        assert named[root.get("aria-labelledby")]
        assert named[root.get("aria-describedby")]
        assert "nan" not in picture
        assert "inf" not in re.sub(r">[^<]*<", "", picture)


def test_nothing_that_samples_say_becomes_markup():
    bad = [
        {
            **one,
            "id": HOSTILE,
            "stack": HOSTILE if one["stack"] == "btrfs" else one["stack"],
            "notes": [HOSTILE],
            "infos": {name: {**told, "title": f"{HOSTILE} {name}"} for name, told in one["infos"].items()},
            "axes": {name: {**axis, "title": HOSTILE, "x_title": HOSTILE} for name, axis in one["axes"].items()},
            "jobs": {HOSTILE: HOSTILE},
            "commands": [[HOSTILE]],
            "host": {**HOST, "kernel": HOSTILE},
        }
        for one in [*random_updates(blocks=6), *blogs()]
    ]
    bad += [absent(HOSTILE, HOSTILE, HOSTILE), sample(1, HOSTILE, "ext4", failure=HOSTILE)]
    shown = render(document(bad, made_at=NOW, title=HOSTILE, problems=[HOSTILE], runs=[{"id": HOSTILE, "at": ""}]))
    outline = Outline(shown)
    assert outline.all("script") == []
    assert len(outline.all("style")) == 1
    assert "{{ 7 * 7 }}" in outline.words
    for picture in re.findall(r"<svg.*?</svg>", shown, flags=re.DOTALL):
        ET.fromstring(picture)  # noqa: S314 - our own


def test_a_page_without_any_sample_says_so():
    found = document([], made_at=NOW)
    assert found["scenarios"] == []
    assert "No advice" in Outline(render(found)).words


def test_a_large_run_stays_below_two_megabytes():
    few = random_updates(blocks=2)
    samples = [
        {**one, "stack": stack, "id": f"{stack}-{one['id']}"}
        for stack in STACKS
        for one in few
        if one["stack"] == ("ext4" if STACKS[stack].backend is None else "btrfs")
    ]
    found = document(samples, made_at=NOW)
    (one,) = found["scenarios"]
    assert len(one["ratios"]) == len(STACKS) * (len(STACKS) - 1)
    # As large as a run of seven such scenarios, without the time that their statistics take.
    found["scenarios"] = [
        {**one, "anchor": f"{one['anchor']}-{number}", "layouts": one["layouts"] if number < 2 else []}
        for number in range(7)
    ]
    for chart in (*one["moments"][0]["rows"], *one["moments"][1]["rows"]):
        for bar in chart["bars"]:
            bar["values"] *= 10
    size = len(render(found).encode())
    assert size < 2_000_000


def test_figures_that_are_zero_everywhere_have_no_chart_and_one_zero_no_ratio():
    infos = {f"stalls_{moment}": info(f"Stalls {moment}", "", "less", headline=True) for moment in ("before", "after")}

    def stalls(after):
        return [
            sample(n, "blog", "btrfs", block=n, infos=infos, metrics={"stalls_before": 0.0, "stalls_after": after})
            for n in range(1, 8)
        ]

    assert document(stalls(0.0), made_at=NOW)["scenarios"][0]["moments"] == []
    (family,) = document(stalls(3.0), made_at=NOW)["scenarios"][0]["moments"]
    assert family["rows"][0]["bars"][1]["ratio"] is None
    assert "no ratio" in Outline(render(document(stalls(3.0), made_at=NOW))).words


def test_rows_are_one_for_each_figure():
    samples = [*random_updates(blocks=1)[:1], absent("blog", "juicefs", WHY)]
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows(samples)]
    assert len(found) == len(samples[0]["metrics"]) + 1
    assert found[0]["metric"] == "update_first_s"
    assert (found[0]["unit"], found[0]["value"]) == ("s", samples[0]["metrics"]["update_first_s"])
    assert (found[-1]["metric"], found[-1]["failure"], found[-1]["kind"]) == ("", WHY, "absent")


def test_families_are_names_that_differ_in_the_moment_alone():
    names = [
        "update_none_s",
        "update_second_s",
        "read_after_s",
        "update_first_s",
        "create_s",
        "read_before_s",
        "tps_after",
    ]
    assert list(families(names).values()) == [
        ["update_none_s", "update_first_s", "update_second_s"],
        ["read_before_s", "read_after_s"],
    ]
    assert list(families(["write_s_many", "write_s_none"]).values()) == [["write_s_none", "write_s_many"]]


@pytest.mark.parametrize(
    ("titles", "title"),
    [
        (["Blogs read before the snapshot", "Blogs read after the snapshot"], "Blogs read"),
        (["Random update, first pass", "Random update, second pass"], "Random update"),
        (["Before: extents", "After: extents"], "Extents"),
        (["One", "Other"], "One"),
        (["One", "One"], "One"),
        (
            ["Random update with no snapshot there, until durable", "Random update, second pass, until durable"],
            "Random update, until durable",
        ),
        (["Update, first pass: a write, p99", "Update, second pass: a write, p99"], "Update: a write, p99"),
    ],
)
def test_several_moments_have_one_title(titles, title):
    assert common_title(titles) == title


@pytest.mark.parametrize(
    ("titles", "moments"),
    [
        (
            ["Blogs read before the snapshot", "Blogs read after the snapshot"],
            ["before the snapshot", "after the snapshot"],
        ),
        (["Before: extents", "After: extents"], ["Before", "After"]),
        (["Update with none there, durable", "Update, second pass, durable"], ["with none there", "second pass"]),
        (["One", "One"], ["before", "after"]),
    ],
)
def test_moments_are_called_by_what_differs(titles, moments):
    assert moment_titles(["x_before", "x_after"], titles) == moments


def test_a_spread_of_one_value_is_that_value():
    assert set(spread([3.0]).values()) == {1, 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0])["median"] == 2.5


def test_curves_take_each_x_that_any_sample_has():
    axis = {"title": "Latency", "x_title": "threads", "x_unit": "", "x": [1, 2], "unit": "s"}
    samples = [
        sample(1, "x", "btrfs", series={"p99": [1.0, 2.0]}, axes={"p99": axis}),
        sample(2, "x", "btrfs", series={"p99": [3.0]}, axes={"p99": {**axis, "x": [1]}}),
    ]
    (found,) = curves(samples)
    assert [(point["x"], point["median"], point["n"]) for point in found["lines"][0]["points"]] == [
        (1, 2, 2),
        (2, 2, 1),
    ]
    assert timelines(samples) == []


def test_of_many_quantiles_two_are_drawn():
    axis = {"title": "Latency", "x_title": "threads", "x_unit": "", "x": [1, 2], "unit": "s"}
    names = ["create_min", "create_p50", "create_p99", "create_max", "read_p50_direct", "read_p999_direct", "iops"]
    one = sample(1, "x", "btrfs", series={name: [1.0, 2.0] for name in names}, axes=dict.fromkeys(names, axis))
    drawn = [chart["series"] for chart in curves([one]) if chart["drawn"]]
    assert drawn == ["create_p50", "create_p99", "read_p50_direct", "read_p999_direct", "iops"]


def test_layouts_and_tables_of_nothing_are_empty():
    assert layouts([sample(1, "x", "btrfs")]) == []
    assert metric_table([sample(1, "x", "btrfs", infos={"a": info("A", "s", "less")})]) == []


def test_two_pairs_say_nothing_and_do_so_in_few_words():
    found = document(random_updates(blocks=2), made_at=NOW)["scenarios"][0]
    assert "any" in {one["interval_text"] for one in found["ratios"]}
    assert {one["words"] for one in found["ratios"]} == {"too few pairs to say: 2 of 6"}
    assert max(len(one["text"]) for one in found["ratios"]) <= 20


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.4249, "1.42"), (0.0412, "0.041"), (12.46, "12.5"), (1240.0, "1,240"), (1e58, ">10,000"), (0.0, "<0.0001")],
)
def test_ratios_have_three_digits_or_a_bound(value, words):
    assert number_words(value) == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.3, 1.57, "1.30–1.57"),
        (2.55e-58, 4e57, "any"),
        (0.0, float("inf"), "any"),
        (2.55e-58, 1.2, "<0.0001–1.20"),
        (1e8, 1e9, ">10,000"),
        (7.9999999, 8.0000001, "8.00"),
    ],
)
def test_intervals_are_told_for_people_however_wide_or_narrow(low, high, words):
    assert interval_words(low, high) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.42, "42 % more"), (0.97, "3.0 % less"), (1.00002, "less than 0.1 % more"), (0.9997, "less than 0.1 % less")],
)
def test_a_difference_is_never_told_as_none(value, words):
    assert difference_words(Ratio(value=value, low=value * 0.999999, high=value * 1.000001, n=8)) == words
