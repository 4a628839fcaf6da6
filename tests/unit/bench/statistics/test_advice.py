"""From samples to findings, and from findings to the recommendation."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.bench.model import MetricInfo
from snapmgr.bench.run.schedule import SampleSchedule, slots
from snapmgr.bench.statistics.advice import Advice, Conditions, advise
from snapmgr.bench.statistics.findings import Finding, comparisons, findings, narrow_enough
from snapmgr.bench.statistics.ratio import Noise, Ratio
from snapmgr.bench.statistics.uses import USES
from snapmgr.contract.records import Capabilities
from support.bench.sim import DISK, INFO, document

UPDATE = MetricInfo(name="update_s", title="Random update", unit="s", better="less", headline=True)
READ = MetricInfo(name="read_bytes_s", title="Linear read", unit="B/s", better="more", headline=True)
SIZE = MetricInfo(name="size_bytes", title="Size", unit="B", better="neither", headline=True)
STACKS = ("btrfs", "ext4", "lvm-thin+xfs", "xfs-reflink")
CONTROLLED = replace(DISK, controls=("ext4",))


def ratio(value, *, spread=1.1, n=8):
    return Ratio(value=value, low=value / spread, high=value * spread, n=n)


QUIET = Noise(ratio=ratio(1.0))


def finding(stack, against, value, *, metric=UPDATE, spread=1.1, n=8, noise=QUIET):
    return Finding(
        id=f"random-update/{metric.name}/{stack}/{against}",
        experiment="random-update",
        metric=metric,
        stack=stack,
        against=against,
        ratio=ratio(value, spread=spread, n=n),
        samples=("0001",),
        noise=noise,
    )


def texts(sentences):
    return [sentence.text for sentence in sentences]


# ------------------------------------------------------------------------------------------------------------ findings


def samples(figures, *, stacks=STACKS[:2], blocks=8, **changed):
    """Return samples of `blocks` blocks; `figures` by stack, slightly different in each block and for each twin."""
    schedule = SampleSchedule(name="random-update", stacks=stacks, seed=1, sample_s=10)
    return [
        document(
            100 * block + slot.position,
            schedule,
            slot,
            figures[slot.stack] * (1 + 0.01 * ((block * 7 + slot.position) % 5)),
        )
        | changed
        for block in range(blocks + 1)
        for slot in slots(schedule, block)
    ]


def test_findings_name_the_stacks_the_metric_and_their_samples():
    made = samples({"btrfs": 20, "ext4": 10})
    found = findings(made, seed=1)
    (one,) = found.found
    assert (one.id, one.stack, one.against) == ("random-update/update_s/btrfs/ext4", "btrfs", "ext4")
    assert (one.ratio.n, one.verdict, one.seen_from("ext4").verdict) == (8, "worse", "better")
    assert one.ratio.value == pytest.approx(2, rel=0.05)
    assert one.seen_from("ext4").ratio.value == pytest.approx(1 / one.ratio.value)
    by_id = {sample["id"]: sample for sample in made}
    assert {by_id[ident]["kind"] for ident in one.samples} == {"measured"}
    assert len(one.samples) == 16
    assert one.noise
    assert one.noise.ratio.n == 8
    assert not found.problems
    with pytest.raises(ValueError, match="nothing about xfs"):
        one.seen_from("xfs")


@pytest.mark.parametrize(
    "spoil",
    [{"failure": "disk full"}, {"checks": [{"name": "old data", "ok": False, "detail": ""}]}, {"kind": "pilot"}],
)
def test_samples_that_failed_or_prove_nothing_do_not_count(spoil):
    made = [sample | (spoil if sample["block"] == 3 else {}) for sample in samples({"btrfs": 20, "ext4": 10})]
    (one,) = findings(made, seed=1).found
    assert one.ratio.n == 7
    assert one.noise
    assert one.noise.ratio.n == 7


def test_blocks_of_several_runs_are_not_mixed():
    first = samples({"btrfs": 20, "ext4": 10}, run="a")
    second = samples({"btrfs": 2000, "ext4": 1000}, run="b")
    (one,) = findings(first + second, seed=1).found
    assert one.ratio.n == 16
    assert one.ratio.high < 2.2


def test_the_error_is_shared_by_all_pairs_and_metrics_from_the_pilot_on():
    made = samples(dict.fromkeys(STACKS, 10), stacks=STACKS)
    assert comparisons(made) == comparisons(made[:4]) == 6
    two = [
        sample
        | {
            "infos": {"update_s": INFO, "other": INFO, "more": INFO | {"headline": False}},
            "metrics": {"update_s": 1, "other": 2},
        }
        for sample in made
    ]
    assert comparisons(two) == 12
    alone, shared = (findings(made, seed=1, family=family).found[0].ratio for family in (1, None))
    assert shared.low < alone.low
    other = [sample | {"variant": "printed"} for sample in made]
    assert comparisons(made + other) == 12
    assert {one.experiment for one in findings(made + other, seed=1).found} == {
        "random-update",
        "random-update printed",
    }


def test_a_figure_of_0_is_told_instead_of_a_ratio():
    found = findings(samples({"btrfs": 20, "ext4": 0}), seed=1)
    assert not found.found
    assert found.problems == (
        "random-update: Random update is 0 in an A/A pair of ext4: the noise is that of the others.",
        "random-update: Random update is 0 in some samples, so that there is no ratio of btrfs and ext4.",
    )


def test_a_figure_of_0_leaves_the_ratios_of_the_other_stacks_alone():
    made = samples({"btrfs": 20, "ext4": 10, "lvm-thin+xfs": 30, "xfs-reflink": 20}, stacks=STACKS, blocks=12)
    twice = {one["block"] for one in made if (one["stack"], one["kind"]) == ("ext4", "a/a")}
    zero = next(
        one for one in made if (one["stack"], one["kind"]) == ("ext4", "measured") and one["block"] not in twice
    )
    before = {one.id: one for one in findings(made, seed=1).found}
    zero["metrics"] = {"update_s": 0}
    found = findings(made, seed=1)
    assert {one.id: one for one in found.found} == {
        ident: one for ident, one in before.items() if "ext4" not in {one.stack, one.against}
    }
    assert len(found.found) == 3
    assert found.problems == (
        "random-update: Random update is 0 in some samples, so that there is no ratio of btrfs and ext4, "
        "nor of ext4 and lvm-thin+xfs, nor of ext4 and xfs-reflink.",
    )


def test_an_a_a_pair_with_a_0_is_left_out_of_the_noise_with_the_others_of_its_stack():
    made = samples({"btrfs": 20, "ext4": 10, "xfs": 20}, stacks=("btrfs", "ext4", "xfs"), blocks=12)
    without = [one for one in made if (one["stack"], one["kind"]) != ("ext4", "a/a")]
    next(one for one in made if (one["stack"], one["kind"]) == ("ext4", "a/a"))["metrics"] = {"update_s": 0}
    found = findings(made, seed=1)
    assert found.found == findings(without, seed=1).found
    assert found.found[0].noise
    assert len(found.found) == 3, "the measured ones are not 0"
    assert found.problems == (
        "random-update: Random update is 0 in an A/A pair of ext4: the noise is that of the others.",
    )


def test_stacks_that_share_no_block_are_told():
    made = samples({"btrfs": 20, "ext4": 10})
    apart = [sample for sample in made if (sample["block"] < 4) == (sample["stack"] == "ext4")]
    assert findings(apart, seed=1).problems == ("random-update: no block has Random update of both btrfs and ext4.",)


def test_narrow_enough_looks_at_the_first_blocks_of_one_experiment():
    quiet = samples({"btrfs": 20, "ext4": 10}, blocks=12)
    later = [
        sample | ({"metrics": {"update_s": 10.0 ** (sample["block"] % 3)}} if sample["block"] > 8 else {})
        for sample in quiet
    ]
    ask = {"within": 0.1, "family": 1, "seed": 1}
    assert narrow_enough(later, "random-update", 8, **ask)
    assert not narrow_enough(later, "random-update", 8, within=0.001, family=1, seed=1)
    wide = [
        sample | {"metrics": {"update_s": 1.0 + (sample["block"] * 31 + sample["position"]) % 7}}
        for sample in (sample | {"position": place} for place, sample in enumerate(quiet))
    ]
    assert not narrow_enough(wide, "random-update", 12, **ask)
    assert narrow_enough(wide, "blog", 12, **ask), "nothing is waited for where there is no ratio"


# ------------------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (finding("a", "b", 0.5), "better"),
        (finding("a", "b", 2), "worse"),
        (finding("a", "b", 2, metric=READ), "better"),
        (finding("a", "b", 2, metric=SIZE), "differs"),
        (finding("a", "b", 1.05), "not shown"),
        (finding("a", "b", 2, n=5), "not shown"),
        (finding("a", "b", 1.2, noise=replace(QUIET, ratio=ratio(0.8, spread=1.5))), "not shown"),
        (finding("a", "b", 9, noise=replace(QUIET, ratio=ratio(1.5))), "not shown"),
        (finding("a", "b", 2, noise=None), "worse"),
    ],
)
def test_a_difference_is_shown_beyond_the_interval_and_the_noise(one, verdict):
    assert one.verdict == verdict
    back = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert one.seen_from("b").verdict == back


# -------------------------------------------------------------------------------------------------------------- advice


def test_the_one_that_beats_each_other_and_loses_nothing_is_recommended_with_its_costs():
    told = advise(
        [
            finding("btrfs", "xfs-reflink", 2),
            finding("btrfs", "ext4", 3),
            finding("ext4", "xfs-reflink", 0.65),
            finding("btrfs", "xfs-reflink", 1.02, metric=READ),
        ],
        replace(CONTROLLED, steady=False, absent={"lvm+ext4": "device-mapper is missing"}),
    )
    assert told.recommended == "xfs-reflink"
    assert texts(told.sentences) == [
        "For this disk: xfs-reflink.",
        "xfs-reflink is shown better than btrfs, and worse in no metric: Random update (random-update): "
        "0.50 times (0.45–0.55) that of btrfs.",
    ]
    assert texts(told.costs) == [
        "Random update (random-update): 1.54 times (1.40–1.69) that of ext4, without snapshots."
    ]
    assert told.costs[0].evidence == ("random-update/update_s/ext4/xfs-reflink",)
    assert texts(told.not_shown) == [
        "Linear read (random-update): no difference shown between btrfs and xfs-reflink 1.02 (0.93–1.12)."
    ]
    assert texts(told.caveats) == [
        "The device was not brought to a steady state: under lasting writes the figures may be others.",
        "Not compared: lvm+ext4: device-mapper is missing",
    ]


def test_a_stack_of_which_a_sample_failed_is_never_recommended():
    found, why = [finding("btrfs", "xfs-reflink", 2)], "2 of 9 samples failed, at last with: the snapshot was lost"
    assert advise(found, replace(DISK, failed={"btrfs": why})).recommended == "xfs-reflink"
    told = advise(found, replace(DISK, failed={"xfs-reflink": why}))
    assert told.recommended is None
    assert texts(told.sentences) == [
        f"No advice: xfs-reflink leads where it was measured, but {why}.",
        "xfs-reflink is shown better than btrfs, and worse in no metric: Random update (random-update): "
        "0.50 times (0.45–0.55) that of btrfs.",
    ]
    assert texts(told.caveats) == [f"xfs-reflink: {why}. They count for nothing."]


def test_a_control_is_never_recommended():
    told = advise(
        [finding("btrfs", "ext4", 3), finding("ext4", "xfs-reflink", 0.3), finding("btrfs", "xfs-reflink", 1)],
        CONTROLLED,
    )
    assert told.recommended is None
    assert texts(told.sentences) == ["No advice: no difference was shown."]


def test_who_is_best_in_what_is_said_where_nobody_is_in_all():
    told = advise([finding("btrfs", "xfs-reflink", 2), finding("btrfs", "xfs-reflink", 2, metric=READ)], DISK)
    assert told.recommended is None
    assert texts(told.sentences) == [
        "No single storage for this disk: none is shown better than every other one and worse in no metric.",
        "Best in Random update (random-update): xfs-reflink (0.50 times (0.45–0.55) that of btrfs).",
        "Best in Linear read (random-update): btrfs (2.00 times (1.82–2.20) that of xfs-reflink).",
    ]


def test_a_stack_that_is_beaten_is_named_where_the_best_two_are_equal():
    told = advise(
        [finding("a", "c", 0.5), finding("b", "c", 0.5), finding("a", "b", 1)],
        DISK,
    )
    assert told.recommended is None
    assert [text.split(",")[0] for text in texts(told.sentences[1:])] == [
        "a is shown better than c",
        "b is shown better than c",
    ]


@pytest.mark.parametrize(
    ("conditions", "word"), [(replace(DISK, loop=True), "loop device"), (replace(DISK, guest=True), "guest")]
)
def test_loop_devices_and_guests_carry_an_indicative_order_and_no_advice(conditions, word):
    found = [finding("a", "b", 5), finding("a", "c", 1.02), finding("b", "c", 0.2)]
    told = advise(found, conditions, use=USES["oltp"])
    assert (told.recommended, told.sure, told.order) == (None, "indicative", (("b",), ("a", "c")))
    assert told.sentences[0].text.startswith("Indicative, for a database with snapshots: 1. b; 2. a, c. No advice: ")
    assert word in told.sentences[0].text
    assert told.not_shown
    assert "On a disk the order may be another one." in texts(told.confidence)


def test_machines_that_differ_carry_nothing():
    told = advise([finding("a", "b", 5)], replace(DISK, mixed=True, loop=True))
    assert (told.recommended, told.sure, told.order, len(told.sentences)) == (None, "none", (), 1)
    assert "machines" in told.sentences[0].text


def test_what_to_avoid_is_what_another_one_beats_and_what_failed():
    found = [finding("a", "b", 2), finding("a", "c", 4), finding("b", "c", 2)]
    told = advise(found, replace(DISK, failed={"b": "1 of 9 samples failed"}))
    assert told.order == (("c",), ("b",), ("a",))
    assert texts(told.avoid) == [
        "b: 1 of 9 samples failed.",
        "a: Random update (random-update): 4.00 times (3.64–4.40) that of c; better in nothing.",
    ]
    assert texts(told.confidence) == [
        "A difference was shown in 3 of 3 comparisons of 8 blocks each; 95 % of all such reports have no false one."
    ]


VOLUME = Capabilities(atomicity="volume", clone="native", survives_origin=True)
CLASSIC = Capabilities(atomicity="volume", clone="scratch", survives_origin=False)
FILES = Capabilities(atomicity="file", clone="native", survives_origin=True)


def test_a_storage_that_copies_file_by_file_is_not_advised_without_saying_so():
    found = [finding("a", "b", 2), finding("a", "c", 4), finding("b", "c", 2)]
    known = replace(DISK, guarantees={"a": CLASSIC, "b": VOLUME, "c": FILES})
    told = advise(found, known, use=USES["oltp"])
    assert told.recommended == "c"
    assert texts(told.guarantees) == [
        "c: a snapshot is atomic for each file only; a running server needs its process frozen during the copy "
        '(quiesce = "freeze-process"), or must be stopped; it survives the deletion of its origin.',
        "Without freezing the server, the first in this order: b.",
    ]
    (alone,) = texts(advise(found, known, use=USES["files"]).guarantees)
    assert alone == "c: a snapshot is atomic for each file only; it survives the deletion of its origin."
    classic = advise([finding("a", "c", 0.5)], known, use=USES["oltp"])
    assert texts(classic.guarantees) == [
        "a: a snapshot is atomic for the whole volume; a running server needs a short lock, or none if all its tables "
        "are InnoDB; it does not survive the deletion of its origin.",
    ]


@pytest.mark.parametrize(
    ("found", "word"),
    [([], "fewer than two"), ([finding("a", "ext4", 3)], "fewer than two"), ([finding("a", "b", 3, n=5)], "5 blocks")],
)
def test_too_little_carries_no_advice(found, word):
    told = advise(found, CONTROLLED)
    assert told.recommended is None
    assert word in told.sentences[0].text


def test_twins_that_differ_are_told_and_nothing_is_concluded():
    told = advise([finding("a", "b", 9, noise=replace(QUIET, ratio=ratio(1.5)))], DISK)
    assert told.recommended is None
    assert "the same stack, measured twice, is shown to differ" in told.caveats[0].text
    assert "noise is not known" in advise([finding("a", "b", 9, noise=None)], DISK).caveats[0].text


def test_what_nobody_can_read_is_told_in_words():
    """Pairs that are too few for the level have intervals of a hundred powers of ten."""
    hopeless = [finding("a", "b", 1.3, spread=1e58, noise=None), finding("a", "ext4", 1e58, spread=2.0)]
    twins = replace(QUIET, ratio=ratio(1e9, spread=10))
    told = advise([*hopeless, finding("b", "ext4", 3e-40, noise=twins, metric=READ)], CONTROLLED)
    said = " ".join(texts(all_sentences(told)))
    assert "no difference shown between a and b 1.30 (any)" in said
    assert "is shown to differ, >10,000 (>10,000)" in said
    assert not re.search(r"\de[+-]?\d|\d{6}|∞", said), said


@st.composite
def worlds(draw):
    """Some findings among some stacks in some metrics; some pairs are missing."""
    stacks = STACKS[: draw(st.integers(2, 4))]
    found = []
    for metric in draw(st.sampled_from([(UPDATE,), (UPDATE, READ), (UPDATE, READ, SIZE)])):
        for place, stack in enumerate(stacks):
            for against in stacks[place + 1 :]:
                if draw(st.integers(0, 9)):
                    value = draw(st.sampled_from([0.3, 0.9, 1.0, 1.2, 4.0]))
                    spread, n = draw(st.sampled_from([1.05, 1.5, math.inf])), draw(st.sampled_from([5, 6, 20]))
                    noise = draw(st.sampled_from([None, QUIET, QUIET, replace(QUIET, ratio=ratio(1.3))]))
                    found.append(finding(stack, against, value, metric=metric, spread=spread, n=n, noise=noise))
    conditions = Conditions(
        loop=draw(st.integers(0, 9)) == 0,
        guest=draw(st.integers(0, 9)) == 0,
        steady=draw(st.none() | st.booleans()),
        controls=("ext4",) if draw(st.booleans()) else (),
    )
    return found, conditions


def all_sentences(told: Advice):
    return [*told.sentences, *told.costs, *told.not_shown, *told.caveats]


@given(worlds())
def test_advice_stands_on_what_was_shown_and_on_nothing_else(world):
    found, conditions = world
    told = advise(found, conditions)
    ids = {one.id: one for one in found}
    assert all(ident in ids for sentence in all_sentences(told) for ident in sentence.evidence)
    for sentence in told.not_shown:
        assert all(ids[ident].verdict == "not shown" for ident in sentence.evidence)
    best = told.recommended
    if best is None:
        assert not told.costs
        return
    assert not conditions.loop
    assert not conditions.guest
    assert best not in conditions.controls
    rivals = {stack for one in found for stack in (one.stack, one.against)} - {best, *conditions.controls}
    assert rivals
    for rival in rivals:
        verdicts = [one.seen_from(best).verdict for one in found if {one.stack, one.against} == {best, rival}]
        assert "better" in verdicts, f"{best} is not shown better than {rival}"
        assert "worse" not in verdicts, f"{best} is shown worse than {rival}"
    assert all(ids[ident].verdict in {"better", "worse"} for sentence in told.sentences for ident in sentence.evidence)


@given(worlds(), st.randoms(use_true_random=False))
def test_advice_does_not_depend_on_order_or_side(world, random):
    found, conditions = world
    turned = [one.seen_from(random.choice([one.stack, one.against])) for one in found]
    random.shuffle(turned)
    assert advise(turned, conditions).recommended == advise(found, conditions).recommended


@given(worlds())
def test_without_a_shown_difference_there_is_no_advice(world):
    found, conditions = world
    equal = [
        replace(one, ratio=replace(one.ratio, low=min(one.ratio.low, 1), high=max(one.ratio.high, 1))) for one in found
    ]
    told = advise(equal, conditions)
    assert told.recommended is None
    assert told.sentences[0].text.startswith("No advice")
    assert len(told.sentences) == 1
