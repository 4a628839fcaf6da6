"""Job files are what fio takes, its failures keep its words, and odd documents are read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.bench import fio
from snapmgr.bench.fio import FioRun, Windows, add_windows, parse_document, read_windows, run_fio, write_job
from snapmgr.contract.errors import CommandError, ConfigError, MissingRequirementError
from snapmgr.contract.records import Completed

_SIDE = {"total_ios": 2, "io_bytes": 8192, "runtime": 2000, "clat_ns": {"N": 2, "max": 29, "bins": {"10": 1, "30": 1}}}
_NOTHING = {"total_ios": 0, "io_bytes": 0, "runtime": 0, "clat_ns": {"N": 0, "max": 0}}


def _report(name="a", *, error=0):
    return {"jobname": name, "error": error, "read": _NOTHING, "write": _SIDE, "sync": {"total_ios": 0}}


class _Runner:
    """Runs nothing; says what it was told to say."""

    def __init__(self, stdout, stderr=""):
        self.stdout, self.stderr = stdout, stderr
        self.calls = []

    def run(self, argv, **options):
        self.calls.append((tuple(argv), options))
        return Completed(argv=tuple(argv), returncode=0, stdout=self.stdout, stderr=self.stderr)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(fio, "find_program", lambda name: f"/usr/bin/{name}")


def _options(job, section):
    lines = job.split(f"[{section}]\n")[1].split("\n\n")[0].splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def test_job_has_defaults_that_a_section_overrides():
    job = write_job("run", {"global": {"randseed": 9, "time_based": None}, "w": {"rw": "write"}}, directory=Path("/m"))
    whole = _options(job, "global")
    assert whole["randseed"] == "9"
    assert whole["refill_buffers"] == "1"
    assert whole["directory"] == "/m"
    assert "\ntime_based\n" in job
    assert _options(job, "w") == {"new_group": "", "write_bw_log": "run-w", "rw": "write"}


def test_job_without_global_section_has_one():
    assert write_job("run", {"w": {}}, directory=Path("/m")).startswith("[global]\ndirectory=/m\n")


def test_colon_in_a_folder_does_not_make_two_of_it():
    assert r"directory=/a\:b" in write_job("run", {"w": {}}, directory=Path("/a:b"))


@pytest.mark.parametrize(
    ("name", "section", "options"),
    [
        ("a/b", "w", {}),
        ("a", "w]\n[x", {}),
        ("a", "", {}),
        ("a", "w", {"rw": "write\nexec_prerun=reboot"}),
        ("a", "w", {"filename": "${HOME}"}),
    ],
)
def test_what_a_job_file_cannot_hold_is_refused(name, section, options):
    with pytest.raises(ConfigError):
        write_job(name, {section: options}, directory=Path("/m"))


@pytest.mark.usefixtures("installed")
def test_run_keeps_what_repeats_it(tmp_path):
    runner = _Runner("note: something\n" + json.dumps({"jobs": [_report()]}))
    (tmp_path / "first-a_bw.log").write_text("1000, 999999, 0, 0, 0\n")
    run = run_fio("first", {"a": {"rw": "write"}}, directory=Path("/m"), keep=tmp_path, runner=runner)
    assert run.job_file == (tmp_path / "first.fio").read_text()
    argv, options = runner.calls[0]
    assert argv[:3] == ("env", f"--chdir={tmp_path}", "fio")
    assert argv[-1] == "first.fio"
    assert options["timeout_s"] is None
    assert parse_document((tmp_path / "first.json").read_text()) == run.document
    # An earlier run's log is not this one's.
    assert run.windows == {"a": Windows(read=(0, 0), write=(0, 0))}


@pytest.mark.usefixtures("installed")
def test_job_that_failed_is_told_in_words_of_fio(tmp_path):
    said = "fio: io_u error on file /m/a.0.0: No space left on device: write offset=8388608"
    runner = _Runner(json.dumps({"jobs": [_report(), _report("b", error=28)]}), said)
    with pytest.raises(CommandError, match="failed in b: .*No space left on device"):
        run_fio("first", {"a": {}, "b": {}}, directory=Path("/m"), keep=tmp_path, runner=runner)


@pytest.mark.usefixtures("installed")
def test_worker_that_was_killed_is_told_though_fio_itself_says_that_all_went_well(tmp_path):
    # As fio 3.33 printed it when one of two processes of a job got SIGSEGV: exit code 0, no error in the document.
    words = "fio: pid=26044, got signal=11\nfio: file hash not empty on exit\n"
    runner = _Runner(json.dumps({"jobs": [_report()]}), words)
    with pytest.raises(CommandError, match="the result of fio run.fio is incomplete: fio: pid=26044, got signal=11"):
        run_fio("run", {"job": {"rw": "write"}}, directory=tmp_path, keep=tmp_path, runner=runner)


def test_missing_fio_is_told_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr("snapmgr.system.command.PROGRAM_PATH", str(tmp_path))
    with pytest.raises(MissingRequirementError) as caught:
        run_fio("first", {"a": {}}, directory=Path("/m"), keep=tmp_path, runner=_Runner(""))
    assert caught.value.hint == "apt-get install fio"
    assert not list(tmp_path.iterdir())


def test_what_is_no_number_does_not_spoil_the_document():
    text = 'fio: {x}\n{\n"jobs" : [{"jobname": "a", "mean" : -nan, "least": inf, "dev": 0.5}]}\nrest'
    assert parse_document(text)["jobs"] == [{"jobname": "a", "mean": None, "least": None, "dev": 0.5}]


@pytest.mark.parametrize("printed", ["", "fio: failed\n", '{"jobs": []}', '{"jobs": 3}', '{"jobs": [', "{}"])
def test_no_document_is_an_error_that_quotes(printed):
    with pytest.raises(CommandError, match="no json") as caught:
        parse_document(printed)
    assert printed.strip() in str(caught.value)


def test_bins_of_reports_with_one_name_are_added():
    run = FioRun(document={"jobs": [_report(), _report(), _report("b")]}, job_file="", windows={})
    assert run.ios("write", "a") == 4
    assert run.latency_s("write", 0.5, "a") == pytest.approx(10e-9)
    assert run.latency_s("write", 0.51, "a") == pytest.approx(30e-9)
    # The bin's middle is beyond the longest: no quantile is.
    assert run.latencies_s("write") == {"p50": 10e-9, "p99": 29e-9, "p99.9": 29e-9, "max": 29e-9}
    assert run.latency_s("read", 0.5) is None
    assert run.latency_s("read", 1.0) is None
    assert run.seconds() == 2.0
    assert run.iops("write") == 3.0


def test_windows_of_several_jobs_are_added_and_the_unfinished_is_left_out():
    log = "1000, 4, 1, 0, 0\n999, 6, 1, 0, 0\n3001, 8, 0, 0, 0\n3500, 99, 1, 0, 0\n2000, 5, 2, 0, 0\n"
    windows = read_windows(log, 3.5)
    assert windows == Windows(read=(0, 0, 8192), write=(10240, 0, 0))
    assert (windows.without_read, windows.without_write, windows.without_either) == (2, 2, 1)


def test_windows_of_sections_at_the_same_time():
    readers, writers = Windows(read=(1, 0, 0), write=(0, 0, 0)), Windows(read=(0, 0), write=(0, 5))
    assert add_windows([readers, writers]) == Windows(read=(1, 0, 0), write=(0, 5, 0))
    assert add_windows([]) == Windows(read=(), write=())


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("01"), st.integers(0, 99)), max_size=40), st.floats(0, 12))
def test_windows_hold_all_that_was_moved_in_whole_seconds(entries, runtime_s):
    log = "".join(f"{1000 * (second + 1)}, {rate}, {way}, 0, 0\n" for second, way, rate in entries)
    windows = read_windows(log, runtime_s)
    assert len(windows.read) == len(windows.write) == int(runtime_s)
    for way, rates in (("0", windows.read), ("1", windows.write)):
        whole = [rate for second, its, rate in entries if its == way and second < int(runtime_s)]
        assert sum(rates) == 1024 * sum(whole)
