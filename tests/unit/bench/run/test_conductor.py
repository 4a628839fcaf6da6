"""The conductor: order, budget, failures, interruption and resuming, with storage that takes no time."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from snapmgr.api import MissingRequirementError, StorageError
from snapmgr.bench.results import folder as resultsfolder
from snapmgr.bench.results.samples import Results, read
from snapmgr.bench.run.conductor import Conductor
from snapmgr.bench.run.plan import PROFILE, Options, make_plan
from snapmgr.bench.statistics.findings import findings
from snapmgr.bench.storage import scene
from snapmgr.contract.errors import CatalogError, CommandError, ConfigError, NoRoomError
from snapmgr.system.host import this_process
from support.bench.documents import bench_run
from support.bench.fakes import STACKS, FakeBench, FakeClock, FakeScenario, FakeTarget, fake_counted

GIB = 1 << 30


class Site:
    """One folder of results, and what a run is made of."""

    def __init__(self, folder):
        self.results = Results(folder)
        self.clock = FakeClock()
        self.target, self.bench = FakeTarget(), FakeBench()
        self.told, self.advances = [], []
        self.neighbours = lambda: ()
        self.ready = dict
        with self.results.locked():
            self.results.begin(bench_run(id="r"))

    def run(self, *scenarios, spent_s=0.0, **options):
        for scenario in scenarios:
            scenario.clock = self.clock
        options = {"stacks": ("one", "two"), "scenarios": ("work",), "profile": "smoke"} | options
        plan = make_plan(
            Options(**options),
            scenarios=scenarios,
            stacks=STACKS,
            missing_requirements=lambda _: (),
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
                neighbours=self.neighbours,
                ready=self.ready,
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
    assert sample["guarantee"] == {"atomicity": "file", "clone": "native", "survives_origin": True}
    assert sample["spent"]["written_bytes"] == 4096
    assert sample["host"] == {"kernel": "1", "target": {"kind": "loop"}}
    assert sample["checks"] == [{"name": "it was done", "ok": True, "detail": ""}]
    assert sample["parameters"]["profile"] == "smoke"


def test_it_goes_on_until_the_ratios_are_known_well_enough(site):
    noise = Random(3)
    scenario = FakeScenario(figure=lambda _stack, _times: noise.lognormvariate(0, 0.2))
    site.run(scenario, profile="quick", budget_s=1e6)
    noisy = max(sample["block"] for sample in site.samples())
    assert noisy == PROFILE["quick"].most == 8


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
    # Planned with 1.5 s, and takes 4: known after the first.
    scenario = FakeScenario(seconds=2.0)
    scenario._seconds, scenario.needs = 4.0, FakeScenario(seconds=0.5).needs
    site.run(scenario, repeats=2, budget_s=1e6)
    assert [advance.what for advance in site.advances] == [f"work on {stack}" for _, stack, _ in site.kinds()]
    assert site.advances[0].left_s == pytest.approx(8 * 1.5)
    assert site.advances[1].left_s == pytest.approx(7 * 4.0)
    assert (site.advances[-1].left_s, site.advances[-1].done, site.advances[-1].total) == (pytest.approx(4.0), 7, 8)


def test_no_sample_is_written_before_all_facts_about_the_host_are_known(site):
    """Not even one that could not run; and a second start adds none."""

    def ready():
        assert site.results.samples() == []
        return {"steady": True}

    scenario = FakeScenario()
    scenario.suits = lambda stack: "it has no snapshots" if stack.name == "two" else None
    site.ready = ready
    site.run(scenario, repeats=1)
    kinds = Counter(sample["kind"] for sample in site.samples())
    assert kinds["absent"] == 1
    assert kinds["measured"] == 1
    assert {sample["host"]["steady"] for sample in site.samples()} == {True}
    site.run(scenario, repeats=1)
    assert Counter(sample["kind"] for sample in site.samples()) == kinds


def test_what_is_absent_is_written_even_if_there_is_nothing_to_measure(site):
    scenario = FakeScenario()
    scenario.suits = lambda stack: "it has no snapshots" if stack.name == "two" else None
    site.run(scenario, repeats=1, budget_s=60.0, spent_s=100.0)
    assert [sample["kind"] for sample in site.samples()] == ["absent"]


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


@pytest.mark.parametrize("what", ["link", "dangling", "file"])
def test_a_work_folder_that_is_none_is_refused_and_nothing_is_followed(site, tmp_path, what):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis").touch()
    work = site.results.folder / ".work"
    if what == "file":
        work.write_text("mine")
    else:
        work.symlink_to(kept if what == "link" else tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"\.work was not made by a run"):
        site.run(FakeScenario())
    assert site.target.asked == []
    assert (kept / "thesis").exists()
    assert os.path.lexists(work)


def test_a_work_folder_that_is_none_in_the_midst_ends_the_run(site, tmp_path):
    scenario = FakeScenario()
    work = site.results.folder / ".work"

    def exchanged(_stack):
        work.rmdir()
        work.symlink_to(tmp_path)

    site.bench.fail = exchanged
    with pytest.raises(ConfigError, match="was not made by a run"):
        site.run(scenario, repeats=1)
    assert len(site.samples()) == 1
    assert work.is_symlink()


def test_results_that_cannot_be_written_any_more_end_the_run_and_no_storage_is_charged(site, monkeypatch):
    def full(_folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(_stack):
        if len(site.samples()) < 3:
            return None
        monkeypatch.setattr(resultsfolder, "_try_out", full)
        return CommandError("fio: No space left on device")

    site.bench.fail = fail
    with pytest.raises(NoRoomError, match=f"cannot write {site.results.folder}: No space left") as raised:
        site.run(FakeScenario(), repeats=1)
    assert raised.value.exit_code == 1
    assert f"to continue, repeat the command with -o {site.results.folder}" in raised.value.hint
    assert [sample["failure"] for sample in site.samples()] == [""] * 3
    monkeypatch.undo()
    site.bench.fail = lambda _stack: None
    assert site.run(FakeScenario(), repeats=1).measured == 2


@pytest.mark.parametrize("again", [True, False])
def test_results_that_are_gone_end_the_run(site, tmp_path, again):
    scenario = FakeScenario()

    def unmounted(_stack):
        if len(site.samples()) == 2:
            site.results.folder.rename(tmp_path / "elsewhere")
            if again:
                site.results.folder.mkdir()

    site.bench.fail = unmounted
    words = "was replaced while the run was going on" if again else "No such file or directory"
    with pytest.raises(CatalogError, match=words):
        site.run(scenario, repeats=1)
    assert len(read([tmp_path / "elsewhere"]).samples) == 2
    assert not again or os.listdir(site.results.folder) == []


def test_another_benchmark_on_this_machine_is_told_once_and_noted_in_each_sample(site):
    # Before and after each sample.
    runs = iter([(), (), ("/dev/loop7",), (), (), (), ("/dev/loop7",)])
    site.neighbours = lambda: next(runs, ())
    site.run(FakeScenario(), repeats=1)
    noted = [any("another benchmark ran" in note for note in sample["notes"]) for sample in site.samples()]
    assert noted[:4] == [False, True, False, True]
    assert site.told == ["warning: another benchmark runs on this machine, on /dev/loop7: both measure each other"]


def test_runs_of_other_living_processes_are_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(scene, "RUN", tmp_path)

    def note(name, process):
        conductor = {"pid": process.pid, "start_ticks": process.start_ticks, "boot_id": process.boot_id}
        order = {"id": name, "point": str(tmp_path / name / "fs"), "size_bytes": 1, "options": {}}
        record = {"conductor": conductor, "backend": "", "device": f"/dev/{name}", "order": order}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    parent = this_process(os.getppid())
    note("other", parent)
    note("own", this_process())
    note("dead", replace(parent, start_ticks=parent.start_ticks + 1))
    (tmp_path / "damaged.json").write_text("{")
    assert scene.neighbours() == ("/dev/other",)


def test_what_lacks_only_while_it_is_measured_fails_the_sample_with_its_hint(site):
    site.bench.fail = lambda _stack: MissingRequirementError(
        "the program fio is not installed", hint="apt-get install fio"
    )
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


def _whole(tmp_path, **options):
    site = Site(tmp_path / "whole")
    site.run(FakeScenario(), **options)
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
