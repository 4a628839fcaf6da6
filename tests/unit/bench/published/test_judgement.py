"""The published experiments beside ours."""

from __future__ import annotations

import json

import pytest

from snapmgr.bench.published.figures import CLAIMS, STALLS
from snapmgr.bench.published.judgement import compare_published, judge
from snapmgr.bench.scenarios import scenarios
from snapmgr.bench.scenarios.blog import _FILES
from snapmgr.bench.statistics.ratio import Ratio
from snapmgr.bench.storage.stacks import STACKS
from support.bench.samples import HOST, blogs, random_updates, repeated, sample

SPINNING = {**HOST, "device": {"kind": "disk", "model": "Old Disk", "size_bytes": 10**11, "rotational": True}}


def row(found, key):
    (one,) = (each for each in found["rows"] if each["key"] == key)
    return one


def test_published_ratios_are_those_that_were_published():
    ratios = {claim.key: [round(end, 3) for end in claim.ratio] for claim in CLAIMS}
    assert ratios["random-update/fill"] == [0.771, 0.771]
    assert ratios["random-update/update"] == [1.753, 1.753]
    assert ratios["random-update/read"] == [3.418, 3.418]
    assert ratios["blog/reads-before"] == [0.484, 0.484]
    assert ratios["blog/writes-before"] == [0.804, 0.804]
    assert ratios["blog/reads-after"] == [0.379, 0.379]
    assert ratios["blog/writes-after"] == [0.880, 0.880]
    assert ratios["prepare/rung-6"] == [round(6.9 / 62, 3)] * 2
    assert (STALLS[0].stalled, STALLS[0].intervals) == (12, 30)


def test_what_is_compared_is_what_scenarios_measure():
    measured = {one.name: {info.name for info in one.metrics} for one in scenarios()}
    for claim in CLAIMS:
        assert {side.metric for side in (claim.over, claim.under)} - {""} <= measured[claim.scenario]
        assert {side.stack for side in (claim.over, claim.under)} <= set(STACKS)
    assert {curve.removesuffix("_each_s_*") for curve in STALLS[0].curves} <= set(_FILES)


def test_keys_are_unique():
    keys = [one.key for one in (*CLAIMS, *STALLS)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("ours", "verdict", "words"),
    [
        (Ratio(value=1.7, low=1.5, high=1.9, n=8), "holds", "as much as published"),
        (Ratio(value=1.2, low=1.1, high=1.3, n=8), "holds", "less than published"),
        (Ratio(value=4.0, low=3.0, high=5.0, n=8), "holds", "more than published"),
        (Ratio(value=0.8, low=0.7, high=0.9, n=8), "does not hold", "shown to be the other way round"),
        (Ratio(value=1.7, low=0.9, high=3.0, n=8), "not shown", "no difference shown"),
        (Ratio(value=1.7, low=1.5, high=1.9, n=5), "not shown", "too few pairs to say: 5 of 6"),
    ],
)
def test_a_conclusion_is_judged_by_the_side_of_1(ours, verdict, words):
    assert judge((1.753, 1.753), ours) == (verdict, words)


def test_a_range_is_met_anywhere_within():
    assert judge((0.2, 0.7), Ratio(value=0.65, low=0.6, high=0.69, n=8)) == ("holds", "as much as published")
    assert judge((0.2, 0.7), Ratio(value=0.85, low=0.8, high=0.9, n=8)) == ("holds", "less than published")


def test_without_samples_everything_published_is_listed_as_not_measured():
    found = compare_published([])
    assert found["counts"] == {"not measured": len(CLAIMS) + len(STALLS)}
    assert row(found, "random-update/read")["published_text"] == "3.42 (16 min 46 s ÷ 4 min 54 s)"
    assert row(found, "random-update/read")["words"] == "no sample of random-update"
    assert row(found, "innodb-io/direct-nvme")["published_text"] == "0.20–0.70"


def test_a_repetition_on_a_spinning_disk_is_judged_and_comparable():
    ratios = {"fill_unsynced_s": 0.8, "update_first_unsynced_s": 1.75, "read_after_buffered_s": 0.9}
    samples = repeated(ratios, host=SPINNING)
    for one in samples:
        one["parameters"]["profile"] = "paper"
    found = compare_published(samples)
    verdicts = {one["key"]: one["verdict"] for one in found["rows"] if one["experiment"]}
    assert verdicts == {
        "random-update/fill": "holds",
        "random-update/update": "holds",
        "random-update/update-durable": "does not hold",
        "random-update/read": "does not hold",
        "random-update/extents-lvm": "does not hold",
        "random-update/extents-btrfs": "holds",
    }
    update = row(found, "random-update/update")
    assert (update["words"], update["obstacles"], update["experiment"]) == (
        "as much as published",
        [],
        "random-update repaired",
    )
    assert update["ours"]["low"] < 1.75 < update["ours"]["high"]
    json.dumps(found, allow_nan=False)


def test_why_it_is_not_comparable_is_said():
    loop = {**HOST, "device": {"kind": "loop", "size_bytes": 10**9, "loop": {"on": [HOST["device"]]}}}
    found = compare_published(repeated({"fill_unsynced_s": 0.8}, variant="database", host=loop))
    assert row(found, "random-update/fill")["obstacles"] == [
        "the variant 'database' is not the published one",
        "a loop device: the file system below it is measured too",
        "not a spinning disk",
        "1.0 GiB of data",
    ]


def test_each_variant_has_a_row_of_its_own():
    samples = [
        *repeated({"fill_unsynced_s": 0.8}),
        *[{**one, "id": "x" + one["id"]} for one in repeated({"fill_unsynced_s": 1.3}, variant="printed")],
    ]
    found = [one for one in compare_published(samples)["rows"] if one["key"] == "random-update/fill"]
    assert [(one["experiment"], one["verdict"]) for one in found] == [
        ("random-update repaired", "holds"),
        ("random-update printed", "does not hold"),
    ]


def test_one_side_alone_is_not_measured_and_says_what_lacks():
    found = compare_published([one for one in repeated({}) if one["stack"] == "btrfs"])
    assert row(found, "random-update/fill")["verdict"] == "not measured"
    assert row(found, "random-update/fill")["words"] == "no sample of random-update on lvm+ext4 with that figure"
    assert row(found, "random-update/extents-btrfs")["verdict"] == "holds"


def stalled(counts):
    """Return samples of 30 intervals, of which so many had no write after the snapshot, and one before it."""
    moments = {"before": 1, "after": None}
    return [
        sample(
            number,
            "blog",
            "lvm+ext4",
            block=number,
            series={
                f"{what}_each_s_{moment}": [
                    float(second >= 10 * (count if least is None else least)) for second in range(305)
                ]
                for moment, least in moments.items()
                for what in ("written", "commented")
            },
        )
        for number, count in enumerate(counts, 1)
    ]


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ([9, 8, 9, 12, 3, 9], "holds"),
        ([0] * 6, "does not hold"),
        ([0, 3, 0, 3, 0, 3], "not shown"),
        ([1] * 6, "not shown"),
        ([9] * 5, "not shown"),
    ],
)
def test_stalls_hold_if_there_are_more_of_them_after_the_snapshot(counts, verdict):
    found = row(compare_published(stalled(counts)), "blog/stalls-lvm")
    assert found["verdict"] == verdict
    assert found["ours_text"] == f"{sum(counts)} of {30 * len(counts)} intervals of 10 s"
    assert f"before the snapshot {len(counts)} of {30 * len(counts)}" in found["words"]


def test_what_is_no_difference_beyond_a_tenth_contradicts_a_large_one():
    assert judge((1023, 1023), Ratio(value=1, low=1, high=1, n=6)) == ("does not hold", "no difference of more than 0%")
    assert judge((1.75, 1.75), Ratio(value=0.97, low=0.92, high=1.02, n=8))[1] == "no difference of more than 9%"
    assert judge((1.75, 1.75), Ratio(value=0.97, low=0.8, high=1.2, n=8)) == (
        "not shown",
        "no difference shown, and not the published one",
    )
    assert judge((1.05, 1.05), Ratio(value=1, low=0.97, high=1.06, n=8)) == ("not shown", "no difference shown")


def test_a_figure_of_0_still_says_who_has_less():
    samples = repeated({"fill_unsynced_s": 0.8})
    for one in samples:
        if one["stack"] == "lvm+ext4":
            one["metrics"]["fill_unsynced_s"] = 0.0
    found = row(compare_published(samples), "random-update/fill")
    assert found["verdict"] == "not shown"
    assert "LVM + ext4 has less in " in found["words"]


def test_failed_samples_count_for_nothing():
    samples = [{**one, "failure": "the disk was full"} for one in repeated({"fill_unsynced_s": 0.8})]
    assert row(compare_published(samples), "random-update/fill")["verdict"] == "not measured"


def test_the_blogs_are_judged_before_and_after():
    found = compare_published(blogs())
    assert row(found, "blog/reads-after")["verdict"] == "holds"
    assert row(found, "blog/reads-before")["verdict"] == "not shown"
    assert row(found, "blog/reads-kept-lvm")["verdict"] == "holds"
    assert row(found, "blog/reads-kept-btrfs")["verdict"] == "not shown"
    assert row(found, "blog/writes-after")["over"]["value"] == 848


def test_other_scenarios_do_not_disturb():
    assert compare_published(random_updates(blocks=6))["counts"]["not measured"] > 10
