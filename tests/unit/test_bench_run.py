"""The conductor: order, budget, failures, interruption and resuming, with storage that takes no time."""

from __future__ import annotations

import json
import math
from random import Random

import pytest

from snapmgr.api import LackingError, StorageError
from snapmgr.bench.findings import findings
from snapmgr.bench.plan import Wish, make_plan
from snapmgr.bench.results import Results, read
from snapmgr.bench.run import Conductor
from snapmgr.errors import CommandError, ConfigError
from support.benchdocuments import bench_run
from support.benchfakes import STACKS, FakeBench, FakeClock, FakeScenario, FakeTarget, fake_counted

GIB = 1 << 30


class Site:
    """One folder of results, and what a run is made of."""

    def __init__(self, folder):
        self.results = Results(folder)
        self.clock = FakeClock()
        self.target, self.bench = FakeTarget(), FakeBench()
        self.told, self.advances = [], []
        with self.results.locked():
            self.results.begin(bench_run(id="r"))

    def run(self, *scenarios, spent_s=0.0, **wish):
        for scenario in scenarios:
            scenario.clock = self.clock
        wish = {"stacks": ("one", "two"), "scenarios": ("work",), "profile": "smoke"} | wish
        plan = make_plan(
            Wish(**wish),
            scenarios=scenarios,
            stacks=STACKS,
            lacking=lambda _: (),
            memory_bytes=GIB,
            room_bytes=GIB,
        )
        with self.results.locked():
            return Conductor(
                plan,
                self.results,
                "r",
                target=self.target,
                host={"kernel": "1"},
                bench=self.bench,
                counted=fake_counted,
                tell=self.told.append,
                advance=self.advances.append,
                clock=self.clock,
            ).run(spent_s=spent_s)

    def samples(self):
        return self.results.samples()

    def kinds(self):
        return [(sample["block"], sample["stack"], sample["kind"]) for sample in self.samples()]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "results")


def test_a_run_is_pilots_and_mirrored_blocks_each_on_a_fresh_file_system(site):
    ended = site.run(FakeScenario(), repeats=2)
    blocks = {}
    for block, stack, kind in site.kinds():
        blocks.setdefault(block, []).append((stack, kind))
    assert sorted(blocks[0]) == [("one", "pilot"), ("two", "pilot")]
    assert blocks[2] == blocks[1][::-1]
    assert sorted(kind for _, kind in blocks[1]) == ["a/a", "measured", "measured"]
    assert ended.measured == len(site.samples()) == 8
    assert ended.failed == 0
    assert site.target.asked == ["check", "blank", "made"] * 8
    assert not (site.results.folder / ".work").exists()


def test_a_sample_says_what_was_done(site):
    site.run(FakeScenario(figure=lambda _stack, _times: 2.5), repeats=1)
    sample = site.samples()[0]
    assert sample["metrics"] == {"work_s": 2.5}
    assert sample["infos"] == {"work_s": {"title": "Work", "unit": "s", "better": "less", "headline": True}}
    assert sample["seconds"] == 2.0
    assert sample["commands"] == [["mkfs.fake"]]
    assert sample["jobs"] == {"work": "[job]"}
    assert sample["spent"]["written_bytes"] == 4096
    assert sample["host"] == {"kernel": "1", "target": {"kind": "loop"}}
    assert sample["checks"] == [{"name": "it was done", "ok": True, "detail": ""}]
    assert sample["parameters"]["profile"] == "smoke"


def test_it_goes_on_until_the_ratios_are_known_well_enough(site):
    noise = Random(3)
    scenario = FakeScenario(figure=lambda _stack, _times: noise.lognormvariate(0, 0.2))
    site.run(scenario, profile="quick", budget_s=1e6)
    noisy = max(sample["block"] for sample in site.samples())
    assert noisy == 12


def test_steady_figures_are_enough_after_the_least_number_of_blocks(site):
    site.run(FakeScenario(figure=lambda _stack, times: 1.0 + times * 1e-4), profile="quick", budget_s=1e6)
    assert max(sample["block"] for sample in site.samples()) == 6


def test_the_budget_ends_it_and_what_is_left_out_is_told(site):
    ended = site.run(FakeScenario(), FakeScenario("long", seconds=500.0), repeats=6, budget_s=60.0)
    assert site.clock.now - 1000.0 <= 60.0
    assert {sample["scenario"] for sample in site.samples()} == {"work"}
    assert any(sentence.startswith("long is left out") for sentence in ended.left_out)


def test_what_went_by_before_counts_for_the_budget(site):
    site.run(FakeScenario(), repeats=6, budget_s=60.0, spent_s=59.0)
    assert site.clock.now - 1000.0 <= 4.0


def test_time_left_comes_from_what_was_measured(site):
    # Planned with 2 s, and takes 4: known after the first.
    scenario = FakeScenario(seconds=2.0)
    scenario._seconds, scenario.needs = 4.0, FakeScenario(seconds=0.5).needs
    site.run(scenario, repeats=2, budget_s=1e6)
    assert [advance.what for advance in site.advances] == [f"work on {stack}" for _, stack, _ in site.kinds()]
    assert site.advances[0].left_s == pytest.approx(8 * 2.0)
    assert site.advances[1].left_s == pytest.approx(7 * 4.0)
    assert (site.advances[-1].left_s, site.advances[-1].done, site.advances[-1].total) == (pytest.approx(4.0), 7, 8)


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failed_sample_is_kept_with_its_reason_and_counts_for_nothing(site):
    fails = iter([False, True])
    site.bench.fail = lambda stack: (
        CommandError("fio: No space left on device") if stack == "two" and next(fails, False) else None
    )
    ended = site.run(FakeScenario(), repeats=6)
    (failed,) = [sample for sample in site.samples() if sample["failure"]]
    assert failed["failure"] == "fio: No space left on device"
    assert failed["metrics"] == {}
    assert ended.failed == 1
    assert ended.given_up == ()
    assert "No space left" in site.told[0]
    assert f"{failed['id']}.json" in site.told[0]
    assert findings(site.samples(), seed=1).found[0].ratio.n in {5, 6}


@pytest.mark.parametrize(
    ("figure", "ok", "says"),
    [(1.0, False, "it was done: not so"), (math.nan, True, "work_s is no number"), (math.inf, True, "work_s is no")],
)
def test_a_check_that_is_false_and_a_figure_that_is_none_fail_a_sample(site, figure, ok, says):
    scenario = FakeScenario(figure=lambda _stack, _times: figure)
    scenario.check_ok = ok
    site.run(scenario, repeats=1)
    assert all(says in sample["failure"] for sample in site.samples())


def test_three_failures_in_a_row_end_a_stack_and_the_others_go_on(site):
    site.bench.fail = lambda stack: OSError(28, "No space left on device") if stack == "two" else None
    ended = site.run(FakeScenario(), FakeScenario("other"), stacks=("one", "two", "three"), repeats=6, budget_s=1e6)
    stacks = [(sample["scenario"], sample["stack"]) for sample in site.samples()]
    assert stacks.count(("work", "two")) == stacks.count(("other", "two")) == 3
    assert stacks.count(("work", "one")) >= 7
    assert len(ended.given_up) == 2
    assert ended.given_up[0] == (
        "work on two is given up: it failed 3 times in a row, at last with: No space left on device"
    )
    assert max(sample["block"] for sample in site.samples()) == 6


def test_a_stack_that_fails_now_and_then_is_not_given_up(site):
    times = iter(range(1000))
    site.bench.fail = lambda stack: CommandError("no") if stack == "two" and next(times) % 3 else None
    assert site.run(FakeScenario(), repeats=6).given_up == ()


def test_a_device_that_is_another_one_now_ends_the_run(site):
    scenario = FakeScenario()
    site.run(scenario, repeats=1)
    site.target.gone = StorageError("another disk is there now")
    before = len(site.samples())
    with pytest.raises(StorageError, match="another disk"):
        site.run(scenario, repeats=2)
    assert len(site.samples()) == before


def test_a_bug_is_no_failed_sample(site):
    site.bench.fail = lambda _stack: KeyError("oops")
    with pytest.raises(KeyError):
        site.run(FakeScenario())
    assert site.samples() == []


def test_what_lacks_only_while_it_is_measured_fails_the_sample_with_its_hint(site):
    site.bench.fail = lambda _stack: LackingError("the program fio is not installed", hint="apt-get install fio")
    site.run(FakeScenario(), repeats=6)
    assert site.samples()[0]["failure"] == "the program fio is not installed (apt-get install fio)"
    assert len(site.samples()) == 6


def test_what_is_lacking_from_the_start_is_a_row_that_says_why_written_once(site):
    for _ in range(2):
        site.run(FakeScenario(unfit=("control",)), stacks=("one", "control"), repeats=1)
    rows = [sample for sample in site.samples() if sample["kind"] == "absent"]
    assert [(row["stack"], row["failure"], row["scenario"]) for row in rows] == [
        ("control", "CONTROL is not fit for it", "work")
    ]
    assert read([site.results.folder]).problems == []


# ------------------------------------------------------------------------------------------------ interrupted, resumed


def _whole(tmp_path, **wish):
    site = Site(tmp_path / "whole")
    site.run(FakeScenario(), **wish)
    return site.kinds()


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_an_interrupted_run_keeps_its_samples_and_the_second_start_makes_what_is_left(site, tmp_path, at):
    class Interrupted(BaseException):
        pass

    scenario = FakeScenario()
    site.bench.fail = lambda _stack: Interrupted() if len(scenario.ran) == at else None
    with pytest.raises(Interrupted):
        site.run(scenario, repeats=4)
    kept = site.kinds()
    assert len(kept) == at
    assert not (site.results.folder / ".work").exists()
    site.bench.fail = lambda _stack: None
    ended = site.run(scenario, repeats=4)
    assert site.kinds()[:at] == kept
    assert site.kinds() == _whole(tmp_path, repeats=4)
    assert ended.measured == len(site.kinds()) - at
    assert site.run(scenario, repeats=4).measured == 0


def test_the_budget_is_the_whole_runs_and_a_larger_one_goes_on(site):
    assert site.run(FakeScenario(), repeats=6, budget_s=30.0).measured > 0
    assert site.run(FakeScenario(), repeats=6, budget_s=30.0).measured == 0
    assert site.run(FakeScenario(), repeats=6, budget_s=90.0).measured > 0


def test_what_a_killed_run_left_in_its_folder_is_removed(site):
    (site.results.folder / ".work").mkdir()
    (site.results.folder / ".work" / "update.fio").write_text("[job]")
    site.run(FakeScenario(), repeats=1)
    assert not (site.results.folder / ".work").exists()


def test_a_sample_that_is_none_of_the_runs_is_refused(site):
    site.run(FakeScenario(), repeats=1)
    path = site.results.folder / f"{site.samples()[-1]['id']}.json"
    document = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(json.dumps(document | {"position": 77}))
    with pytest.raises(ConfigError, match="none of this run's"):
        site.run(FakeScenario(), repeats=1)


# ------------------------------------------------------------------------------------------------------- what it finds


def test_a_stack_that_was_slowed_on_purpose_is_found_slower_and_equal_ones_are_not(site):
    noise = Random(5)
    scenario = FakeScenario(
        figure=lambda stack, _times: (2.0 if stack == "two" else 1.0) * noise.lognormvariate(0, 0.1)
    )
    site.run(scenario, stacks=("one", "two", "three"), repeats=12, budget_s=1e6)
    verdicts = {(one.stack, one.against): one.verdict for one in findings(site.samples(), seed=1).found}
    assert verdicts == {("one", "three"): "not shown", ("one", "two"): "better", ("three", "two"): "better"}
