"""Results of a benchmark: written once, read with care, never silently dropped."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest

from snapmgr.bench.results import folder as resultsfolder
from snapmgr.bench.results.samples import SCHEMA, Results, read
from snapmgr.bench.statistics.findings import comparisons
from snapmgr.contract.errors import BusyError, CatalogError, ConfigError, NotFoundError
from support.bench.documents import bench_run, bench_sample


@pytest.fixture
def results(tmp_path):
    results = Results(tmp_path / "results")
    with results.locked():
        results.begin(bench_run())
        yield results


def _change(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.chmod(0o644)
    path.write_text(json.dumps(document))


def test_what_was_written_is_read_in_its_order(results):
    for stack in ("xfs-reflink", "btrfs", "ext4"):
        results.write(bench_sample(stack))
    found = read([results.folder])
    assert [sample["stack"] for sample in found.samples] == ["xfs-reflink", "btrfs", "ext4"]
    assert found.problems == []
    assert found.runs == [{"schema": SCHEMA, **bench_run()}]
    (first, *_) = found.samples
    assert first == {"schema": SCHEMA, "id": "0001-random-update-xfs-reflink", **bench_sample("xfs-reflink")}


def test_a_sample_is_a_file_that_nobody_writes_again(results):
    path = results.write(bench_sample("lvm-thin+ext4"))
    assert path.name == "0001-random-update-lvm-thin+ext4.json"
    assert path.stat().st_mode & 0o777 == 0o444
    assert sorted(os.listdir(results.folder)) == [path.name, "run.json"]
    before = path.read_bytes()
    results.write(bench_sample("lvm-thin+ext4", 9.0))
    assert path.read_bytes() == before


def test_a_number_is_not_given_twice_when_the_one_before_is_gone(results):
    first, second = results.write(bench_sample()), results.write(bench_sample())
    first.unlink()
    assert results.write(bench_sample()).name > second.name


@pytest.mark.parametrize(
    "wrong", [{"metrics": {"a": float("nan")}}, {"metrics": {"a": "1"}}, {"block": None}, {"failure": None}]
)
def test_what_could_not_be_read_again_is_not_written(results, wrong):
    with pytest.raises((ValueError, TypeError)):
        results.write(bench_sample(**wrong))
    assert os.listdir(results.folder) == ["run.json"]


def test_folders_are_read_together_and_a_copied_sample_counts_once(results, tmp_path):
    path = results.write(bench_sample())
    other = Results(tmp_path / "other")
    with other.locked():
        other.begin(bench_run(id="20260102T000000Z.00000002"))
        other.write(bench_sample(run="20260102T000000Z.00000002"))
    (other.folder / path.name.replace("0001", "0007")).write_bytes(path.read_bytes())
    found = read([results.folder, other.folder])
    assert len(found.samples) == 2
    assert len(found.runs) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"[1]", "is damaged: it has no schema"),
        (b'{"schema": true}', "is damaged: it has no schema"),
        (b'{"schema": 1}', "is damaged: Object missing required field"),
        (b"\xff\xfe", "is damaged"),
        (b'{"schema": 1, "x": ' + b"[" * 100_000, "is damaged"),
        (b'{"schema": 2}', "was made by a newer snapmgr (schema 2; this one reads 1)"),
        (b'{"schema": 0}', "was made by an older snapmgr (schema 0; this one reads 1)"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_the_others_are_read(results, content, says):
    kept = results.write(bench_sample())
    path = results.folder / "0002-random-update-ext4.json"
    path.write_bytes(content)
    found = read([results.folder])
    assert [sample["id"] for sample in found.samples] == [kept.stem]
    (problem,) = found.problems
    assert problem.startswith(f"{path} {says}")
    with pytest.raises(CatalogError, match=re.escape(str(path))):
        results.samples()


def test_a_field_of_the_wrong_kind_is_told_with_its_place(results):
    path = results.write(bench_sample())
    _change(path, lambda document: document["metrics"].update(update_s="quick"))
    (problem,) = read([results.folder]).problems
    assert problem.startswith(f"{path} is damaged: Expected `float`, got `str` - at `$.metrics")


def test_a_direction_that_is_none_is_told_and_further_words_about_a_figure_are_left_alone(results):
    path = results.write(bench_sample())
    name = next(iter(bench_sample()["infos"]))
    _change(path, lambda document: document["infos"][name].update(later="1"))
    assert read([results.folder]).problems == []
    assert comparisons(read([results.folder]).samples) == 1
    _change(path, lambda document: document["infos"][name].update(better="lesser"))
    (problem,) = read([results.folder]).problems
    assert problem.startswith(f"{path} is damaged: Invalid enum value 'lesser'")


@pytest.mark.parametrize("check", [{}, {"name": "old data", "ok": "false", "detail": ""}])
def test_a_check_that_says_neither_yes_nor_no_is_told_and_not_taken_for_one_that_held(results, check):
    path = results.write(bench_sample())
    _change(path, lambda document: document["checks"].append(check))
    found = read([results.folder])
    assert found.samples == []
    assert found.problems[0].startswith(f"{path} is damaged: ")


def test_a_link_a_fifo_and_a_folder_in_the_place_of_a_sample_are_told(results):
    real = results.write(bench_sample())
    (results.folder / "0002-random-update-ext4.json").symlink_to(real)
    os.mkfifo(results.folder / "0003-random-update-ext4.json")
    (results.folder / "0004-random-update-ext4.json").mkdir()
    assert len(read([results.folder]).problems) == 3


def test_samples_without_their_run_are_told(results):
    results.write(bench_sample())
    (results.folder / "run.json").unlink()
    found = read([results.folder])
    assert len(found.samples) == 1
    assert "run.json is missing" in found.problems[0]


def test_other_files_are_left_alone(results):
    results.write(bench_sample())
    (results.folder / "report.html").write_text("a page")
    (results.folder / ".0002-random-update-btrfs.json.12345").write_text("{")
    assert read([results.folder]).problems == []


def test_a_folder_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "thesis.txt").touch()
    results = Results(tmp_path)
    with pytest.raises(ConfigError, match=r"holds thesis\.txt, and no results"), results.locked():
        pytest.fail("it is written to")
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(ConfigError, match="holds no results"):
        read([tmp_path])
    with pytest.raises(NotFoundError):
        read([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="is not a folder of results"):
        read([tmp_path / "thesis.txt"])


def test_a_folder_that_is_refused_is_not_left(tmp_path, monkeypatch):
    def full(_folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resultsfolder, "_try_out", full)
    with pytest.raises(ConfigError, match="No space left") as raised, Results(tmp_path / "new").locked():
        pytest.fail("it is written to")
    assert raised.value.hint == "make room on its file system, or name another folder with -o"
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_had_begun_is_no_hindrance(tmp_path):
    # No process has this number.
    (tmp_path / ".run.json.4194305").write_text("{")
    results = Results(tmp_path)
    with results.locked():
        results.begin(bench_run())
    assert os.listdir(tmp_path) == ["run.json"]


def test_two_runs_do_not_write_to_one_folder(results):
    with pytest.raises(BusyError, match="another run"), Results(results.folder).locked():
        pytest.fail("both write")
