"""`bench run|list|show|compare` on storage that takes no time: tables, documents, files, exit codes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from random import Random

import pytest

from snapmgr.bench.device.precondition import Conditioning
from snapmgr.bench.results.samples import Results
from snapmgr.bench.run import session
from snapmgr.bench.run.conductor import Conductor
from snapmgr.cli.benchcompare import _conclusion
from snapmgr.cli.main import main
from snapmgr.cli.signals import Interrupted
from snapmgr.contract.errors import CommandError, ConfigError
from support.bench.fakes import STACKS, FakeBench, FakeClock, FakeScenario, FakeTarget, fake_counted


class Lab:
    """Fakes in the place of storage, and the command line called in this process."""

    def __init__(self, monkeypatch, capsys, tmp_path):
        self.capsys, self.folder = capsys, tmp_path / "results"
        self.clock, self.bench, self.target = FakeClock(), FakeBench(), FakeTarget()
        noise = Random(5)
        self.slow = {"two": 2.0}
        self.scenarios = [
            FakeScenario(
                clock=self.clock,
                figure=lambda stack, _times: self.slow.get(stack, 1.0) * noise.lognormvariate(0, 0.05),
                variants=("usual", "odd"),
                unfit=("control",),
            )
        ]
        self.opened = []
        monkeypatch.setattr(session, "scenarios", lambda: self.scenarios)
        monkeypatch.setattr(
            session, "chosen", lambda names: [one for one in self.scenarios if one.name in names] or self.scenarios
        )
        monkeypatch.setattr("snapmgr.bench.scenarios.scenarios", lambda: self.scenarios)
        monkeypatch.setattr("snapmgr.bench.storage.stacks.STACKS", STACKS)
        monkeypatch.setattr(session, "all_stacks", lambda: STACKS)
        monkeypatch.setattr("snapmgr.bench.storage.contributed.all_stacks", lambda: STACKS)
        monkeypatch.setattr(session, "missing_requirements", lambda _stack: ())
        monkeypatch.setattr("snapmgr.bench.storage.stacks.missing_requirements", lambda _stack: ())
        monkeypatch.setattr(session, "opened_target", self._opened)
        # What lies on this machine is nobody's business here.
        monkeypatch.setattr(session, "clear_leftovers", lambda _runner: ())
        monkeypatch.setattr(
            session, "host_facts", lambda _device, *, name: {"kernel": "6.1"} | ({"host": "h"} if name else {})
        )
        monkeypatch.setattr(
            session,
            "Conductor",
            partial(Conductor, bench=self.bench, counted=fake_counted, clock=self.clock, neighbours=lambda: ()),
        )

    @contextmanager
    def _opened(self, text, **given):
        self.opened.append((text, given))
        yield self.target

    def __call__(self, *arguments):
        code = main(["bench", *map(str, arguments)])
        said = self.capsys.readouterr()
        return code, said.out, said.err

    def run(self, *arguments, folder=None):
        return self(
            "run", "--stacks", "one,two", "--on", "loop:1G", "--budget", "1h", *arguments, "-o", folder or self.folder
        )

    def samples(self):
        return Results(self.folder).samples()


@pytest.fixture
def lab(monkeypatch, capsys, tmp_path):
    return Lab(monkeypatch, capsys, tmp_path)


def test_a_run_ends_with_the_page_on_stdout_and_all_else_on_stderr(lab):
    code, out, err = lab.run()
    assert code == 0
    assert out == f"{lab.folder}/report.html\n"
    assert "work usual on " in err
    assert " left: 0 of " in err
    assert "0 of them failed" in err
    page = (lab.folder / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "Work" in page


def test_what_was_slowed_on_purpose_is_found_slower_by_show(lab):
    lab.run("--repeats", "8")
    code, out, _ = lab("show", lab.folder)
    assert code == 0
    (row,) = [line for line in out.splitlines() if "two ÷ one" in line]
    assert row.split()[4].startswith(("1.9", "2.0"))
    assert row.endswith("worse")
    code, out, _ = lab("show", lab.folder, "--json")
    (ratio,) = json.loads(out)["scenarios"][0]["ratios"]
    assert (ratio["stack"], ratio["against"], ratio["verdict"], ratio["n"]) == ("two", "one", "worse", 8)


def test_equal_storages_are_not_found_to_differ(lab):
    lab.slow = {}
    lab.run("--repeats", "8")
    out = lab("show", lab.folder)[1]
    assert "no difference shown" in out
    assert "worse" not in out


def test_one_document(lab):
    code, out, _ = lab.run("--repeats", "1", "--stacks", "one,control", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 0
    assert document["command"] == "bench run"
    assert (document["measured"], document["failed"]) == (3, 0)
    assert document["results"] == str(lab.folder)
    assert document["found"]["absent"] == [
        {"scenario": "work", "stack": "control", "reason": "CONTROL is not fit for it"}
    ]


def test_no_host_name_unless_asked(lab, tmp_path):
    lab.run("--repeats", "1")
    assert "host" not in lab.samples()[0]["host"]
    lab.run("--repeats", "1", "--host-name", folder=tmp_path / "named")
    assert Results(tmp_path / "named").samples()[0]["host"]["host"] == "h"


def test_the_target_is_asked_for_with_what_a_refusal_needs(lab):
    lab.run("work", "--repeats", "1", "--size", "64M", "--wipe", "S3R1AL")
    ((text, given),) = lab.opened
    assert text == "loop:1G"
    assert given["wipe"] == "S3R1AL"
    assert given["size_bytes"] == 128 << 20
    line = " ".join(given["line"])
    assert line.startswith("snapmgr bench run work --stacks one,two ")
    assert "--repeats 1" in line
    assert f"--output {lab.folder}" in line
    assert "--wipe" not in line
    assert "--on" not in line
    assert "--budget 3600s" in line


@pytest.mark.parametrize(
    ("kind", "rotational", "steady"),
    [("device", False, False), ("device", True, None), ("device", None, None), ("loop", False, None)],
)
def test_flash_that_was_not_brought_to_a_steady_state_is_told_so(lab, monkeypatch, kind, rotational, steady):
    lab.target.kind = kind
    monkeypatch.setattr(session, "host_facts", lambda _device, *, name: {"device": {"rotational": rotational}})  # noqa: ARG005
    lab.run("--repeats", "1")
    assert lab.samples()[0]["host"]["steady"] is steady
    assert ("not brought to a steady state" in lab("show", lab.folder)[1]) == (steady is False)


@pytest.mark.parametrize("steady", [True, False])
def test_flash_is_written_to_before_it_is_measured_for_as_long_as_is_said(lab, monkeypatch, steady):
    asked = []
    lab.target.kind = "device"
    monkeypatch.setattr(session, "host_facts", lambda _device, *, name: {"device": {"rotational": False}})  # noqa: ARG005
    monkeypatch.setattr(
        session,
        "make_steady",
        lambda _target, *, within_s, **_: (
            asked.append(within_s)
            or Conditioning(steady=steady, why="so", seconds=9.0, written_bytes=8, rounds=(1.0, 2.0))
        ),
    )
    assert lab.run("--repeats", "1", "--profile", "standard", "--steady", "0")[0] == 0
    lab.folder = lab.folder.with_name("other")
    assert asked == []
    assert lab.target.discard
    assert lab.run("--repeats", "1", "--steady", "10m")[0] == 0
    assert asked == [600.0]
    assert not lab.target.discard, "what is discarded is not steady any more"
    host = lab.samples()[0]["host"]
    assert host["steady"] is steady
    assert host["conditioning"]["rounds"] == [1.0, 2.0]
    assert ("not brought to a steady state" in lab("show", lab.folder)[1]) == (not steady)


# ----------------------------------------------------------------------------------------------------- the second start


def test_an_interrupted_run_says_how_to_go_on_and_the_same_command_does(lab):
    scenario = lab.scenarios[0]
    lab.bench.fail = lambda _stack: Interrupted(2) if len(scenario.ran) == 4 else None
    code, out, err = lab.run("--repeats", "3")
    assert (code, out) == (130, "")
    assert f"4 samples are kept; to continue, repeat the command with -o {lab.folder}" in err
    lab.bench.fail = lambda _stack: None
    code, out, err = lab.run("--repeats", "3", "--budget", "2h")
    assert code == 0
    assert len(lab.samples()) == 2 + 3 * 3
    assert "7 samples, 0 of them failed" in err
    code, _, err = lab.run("--repeats", "3")
    assert code == 0
    assert "everything was measured before" in err


def test_an_interrupted_run_without_samples_leaves_nothing(lab):
    def interrupt(*_, **__):
        raise Interrupted(15)

    lab.target.check = interrupt
    code, _, err = lab.run()
    assert code == 130
    assert "samples are kept" not in err


def test_other_arguments_than_the_first_time_are_refused_with_what_differs(lab):
    lab.run("--repeats", "1")
    before = len(lab.opened)
    code, _, err = lab.run("--repeats", "1", "--seed", "7", "--variant", "odd")
    assert code == 2
    assert "holds a run with other arguments" in err
    assert "seed: 1 the first time, 7 now" in err
    assert "variant: " in err
    assert len(lab.opened) == before
    assert len(lab.samples()) == 5


def test_a_damaged_sample_ends_the_second_start_before_anything_is_measured(lab):
    lab.run("--repeats", "1")
    (lab.folder / "0009-work-one.json").write_text('{"schema": 1}')
    code, _, err = lab.run("--repeats", "1")
    assert code == 1
    assert "0009-work-one.json is damaged" in err


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_refused_target_leaves_no_folder(lab):
    def refuse(_text, **_):
        raise ConfigError("the disk is mounted", hint="take another one")

    session.opened_target = refuse
    code, _, err = lab.run()
    assert code == 2
    assert "the disk is mounted" in err
    assert not lab.folder.exists()


def test_a_storage_that_failed_too_often_is_exit_code_1_and_the_rest_is_shown(lab):
    lab.bench.fail = lambda stack: CommandError("fio failed: No space left on device") if stack == "two" else None
    code, out, err = lab.run("--repeats", "6")
    assert code == 1
    assert out == f"{lab.folder}/report.html\n"
    assert "work usual on two is given up: it failed 3 times in a row" in err
    out = lab("show", lab.folder)[1]
    assert out.count("fio failed: No space left on device") == 4, "each sample, and why the storage is not recommended"


def test_nothing_that_can_be_measured_is_exit_code_7_with_the_reasons(lab):
    lab.scenarios[0] = FakeScenario(lacks="no fio")
    code, _, err = lab.run()
    assert code == 7
    assert "work on one: no fio (install it)" in err
    assert not lab.folder.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--stacks", "zfs"),
        ("--variant", "backwards"),
        ("--profile", "huge"),
        ("--on", "loop:many"),
        ("--on", "/dev/null"),
        ("--on", "/nowhere"),
        ("--size", "8G"),
        ("--repeats", "0"),
        ("--budget", "0"),
        ("--memory", "10M"),
        ("-o", "/nowhere/results"),
        ("-o", "/dev/null"),
        ("-o", "/dev/null/results"),
        ("-o", "/proc/results"),
        ("-o", "/proc/sys"),
        ("-o", "x" * 300),
    ],
)
def test_arguments_that_are_wrong_are_refused_before_anything_is_done(lab, words):
    code, out, err = lab.run(*words) if words[0] != "-o" else lab.run(folder=words[1])
    assert code == 2
    assert out == ""
    assert "snapmgr: error: " in err
    assert "bug" not in err
    assert words[0] != "-o" or (words[1][:8] in err and "-o" in err)
    assert lab.opened == [] or words[0] != "-o"
    assert lab.scenarios[0].ran == []


# -------------------------------------------------------------------------------------------------------- dry run, list


def test_a_dry_run_prints_each_step_and_touches_nothing(lab):
    lab.scenarios.append(FakeScenario("long", seconds=900.0))
    code, out, _ = lab.run("--dry-run")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("would measure on a loop device on a file of 1.0 GiB in /var/tmp")
    assert sum(line.startswith("work usual: block") for line in lines) == 6
    assert [line.endswith("does not fit") for line in lines if line.startswith("long: block 6")] == [True]
    assert any(line.startswith("long is left out") for line in lines)
    assert lab.opened == []
    assert not lab.folder.exists()


def test_a_dry_run_as_a_document(lab):
    document = json.loads(lab.run("--dry-run", "--json")[1])
    assert document["dry_run"] is True
    assert document["steps"][0]["what"] == "work usual: pilot"
    assert document["total_s"] > document["preparation_s"] > 0


def test_the_list_says_what_is_missing(lab):
    lab.scenarios.append(FakeScenario("other", lacks="no fio"))
    code, out, _ = lab("list")
    assert code == 0
    assert "work: How long the work takes" in out
    assert "  variants: usual, odd" in out
    assert "  quick: 128.0 MiB, 2.0 s a sample" in out
    assert "  missing: no fio (install it)" in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == list(STACKS)
    document = json.loads(lab("list", "--json")[1])
    assert document["scenarios"][0]["profiles"]["smoke"]["space_bytes"] == 64 << 20


# ----------------------------------------------------------------------------------------------------- show and compare


def test_show_writes_a_page_and_a_table(lab, tmp_path):
    lab.run("--repeats", "2")
    page, table = tmp_path / "page.html", tmp_path / "samples.csv"
    assert lab("show", lab.folder, "-o", page)[:2] == (0, "")
    assert "</html>" in page.read_text()
    assert lab("show", lab.folder, "-o", table)[:2] == (0, "")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 2 + 2 * 3
    assert {row["metric"] for row in rows} == {"work_s"}
    code, _, err = lab("show", lab.folder, "-o", tmp_path / "page.pdf")
    assert code == 2
    assert ".html nor .csv" in err
    assert lab("show", lab.folder, "-o", tmp_path / "no" / "page.html")[0] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"schema": 99}', "was made by a newer snapmgr"), ("{", "is damaged"), ('{"schema": 0}', "by an older snapmgr")],
)
def test_a_file_that_cannot_be_read_is_named_the_rest_is_shown_and_nothing_is_compared(lab, content, says):
    lab.run("--repeats", "2")
    (lab.folder / "0099-work-two.json").write_text(content)
    code, out, err = lab("show", lab.folder)
    assert code == 1
    assert says in err
    assert "0099-work-two.json" in err
    assert "TWO" in out
    code, out, _ = lab("show", lab.folder, "--json")
    assert (code, json.loads(out)["exit_code"]) == (1, 1)
    code, out, err = lab("compare", lab.folder, lab.folder)
    assert (code, out) == (1, "")
    assert says in err


def test_what_has_become_slower_is_a_regression(lab, tmp_path):
    lab.slow = {}
    lab.run("--repeats", "12")
    lab.slow = {"two": 3.0}
    lab.run("--repeats", "12", folder=tmp_path / "new")
    code, out, err = lab("compare", lab.folder, tmp_path / "new")
    assert code == 1
    assert "work usual on two: Work" in err
    verdicts = {line.split()[2]: line.split()[-1] for line in out.splitlines()[1:]}
    assert verdicts["two"] == "regression"
    assert verdicts["one"] != "regression"
    document = json.loads(lab("compare", lab.folder, tmp_path / "new", "--json")[1])
    assert document["regressions"] == 1
    assert lab("compare", lab.folder, tmp_path / "new", "--tolerance", "400")[0] == 0
    assert lab("compare", lab.folder, lab.folder)[0] == 0


def test_what_cannot_be_compared_is_no_success(lab, tmp_path):
    lab.run("--repeats", "2")
    lab.run("--repeats", "2", "--variant", "odd", folder=tmp_path / "odd")
    code, _, err = lab("compare", lab.folder, tmp_path / "odd")
    assert code == 1
    assert "nothing to compare" in err


def test_published_conclusions_beside_ours(lab, tmp_path):
    lab.run("--repeats", "2")
    code, out, _ = lab("compare", "published", lab.folder)
    assert code == 0
    assert "not measured" in out
    assert "random-update" in out
    document = json.loads(lab("compare", "published", lab.folder, "--json")[1])
    assert document["counts"] == {"not measured": len(document["rows"])}
    assert lab("compare", "published", tmp_path / "nothing")[0] == 1
    assert lab("compare", lab.folder, lab.folder, lab.folder)[0] == 2


def test_a_conclusion_from_something_else_than_was_published_says_so():
    row = {"verdict": "holds", "obstacles": ["a loop device is no spinning disk"]}
    assert _conclusion(row) == "holds (not comparable)"
    assert _conclusion(row | {"obstacles": []}) == "holds"
    assert _conclusion(row | {"verdict": "not shown"}) == "not shown"


def test_the_line_to_paste_has_what_was_set_to_nothing(lab):
    lab.run("work", "--steady", "0", "--seed", "0")
    ((_, given),) = lab.opened
    line = " ".join(given["line"])
    assert "--steady 0s" in line
    assert "--seed 0" in line


def test_as_long_a_preparation_as_the_budget_is_refused(lab):
    code, _, err = lab.run("work", "--steady", "30m", "--budget", "30m")
    assert code == 2
    assert "--steady 30 min uses up the budget, which is 30 min" in err
    assert lab.opened == []


def test_flash_is_not_worn_when_nothing_is_left_to_do(lab, monkeypatch):
    asked = []
    lab.target.kind = "device"
    monkeypatch.setattr(session, "host_facts", lambda _device, *, name: {"device": {"rotational": False}})  # noqa: ARG005
    done = Conditioning(steady=True, why="so", seconds=9.0, written_bytes=8, rounds=(1.0,))
    monkeypatch.setattr(session, "make_steady", lambda *_, **__: asked.append(1) or done)
    for _ in range(2):
        assert lab.run("--repeats", "1", "--steady", "10m")[0] == 0
    assert asked == [1]


def test_an_interruption_before_the_first_sample_is_told_as_one(lab, monkeypatch):
    lab.folder.mkdir()

    def interrupted(*_, **__):
        raise Interrupted(2)

    monkeypatch.setattr(session, "host_facts", interrupted)
    code, _, err = lab.run()
    assert code == 130
    assert "holds no results" not in err


def _python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


CALL = "import sys; from snapmgr.cli.main import main; code = main(sys.argv[1:])"


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "run", "--help"], ["bench", "list"]])
def test_what_computes_nothing_loads_neither_scipy_nor_numpy(arguments):
    done = _python(f"{CALL}; print(code, *sorted(sys.modules), file=sys.stderr)", *arguments)
    code, *modules = done.stderr.splitlines()[-1].split()
    assert code == "0"
    assert not {"numpy", "scipy"} & set(modules)


@pytest.mark.parametrize("arguments", [["show", "RESULTS"], ["compare", "RESULTS", "RESULTS"], ["run", "--dry-run"]])
def test_without_scipy_the_error_names_the_extra(lab, arguments):
    lab.run("work")
    hide = "from importlib import util; util.find_spec = lambda name: None; "
    done = _python(
        f"{hide}{CALL}; sys.exit(code)", "bench", *(str(lab.folder) if a == "RESULTS" else a for a in arguments)
    )
    assert done.returncode == 7
    assert "the benchmark needs scipy for its statistics, and scipy is not installed" in done.stderr
    # Without pip, too: nothing can be found here.
    assert f"uv pip install --python {sys.executable} 'snapmgr[bench]'" in done.stderr
