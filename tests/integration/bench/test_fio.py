"""Real runs of fio: what they find, and what they say when they cannot."""

from __future__ import annotations

import subprocess

import pytest

from snapmgr.bench.fio import run_fio
from snapmgr.contract.errors import CommandError
from snapmgr.system.command import CommandRunner

pytestmark = pytest.mark.needs("fio")

_RUNNER = CommandRunner()
_MIB = 1 << 20


@pytest.fixture
def folders(tmp_path):
    data, keep = tmp_path / "da:ta", tmp_path / "keep"
    data.mkdir()
    keep.mkdir()
    return data, keep


def test_run_writes_what_it_was_asked_for_and_can_be_repeated_by_hand(folders):
    data, keep = folders
    sections = {
        "global": {"filename": "file", "size": "2M", "bs": "16k", "randseed": 4},
        "fill": {"rw": "write"},
        "update": {"rw": "randwrite", "stonewall": None, "fsync": 16},
    }
    run = run_fio("first", sections, directory=data, keep=keep, runner=_RUNNER)
    assert (data / "file").stat().st_size == 2 * _MIB
    assert run.ios("write", "fill") == 128
    assert run.ios("write", "update") == 128
    assert run.ios("sync", "update") >= 7
    assert run.latencies_s("write", "update")["p50"] > 0
    content = (data / "file").read_bytes()
    (data / "file").unlink()
    # The same seed, the same data at the same places; and the kept log only grows.
    subprocess.run(["fio", "first.fio"], cwd=keep, check=True, stdout=subprocess.DEVNULL)
    assert content == (data / "file").read_bytes()


def test_windows_without_are_counted_of_a_job_that_pauses(folders):
    data, keep = folders
    pauses = {"rw": "write", "size": "1M", "bs": "4k", "time_based": None, "runtime": 4}
    pauses |= {"thinktime": "2500ms", "thinktime_blocks": 16}
    run = run_fio("pauses", {"job": pauses}, directory=data, keep=keep, runner=_RUNNER)
    windows = run.windows["job"]
    # Writes at 0 s and 2.5 s.
    assert [bool(rate) for rate in windows.write[:4]] == [True, False, True, False]
    assert windows.without_read == len(windows.read)
    assert windows.without_either == windows.without_write


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rw": "nonsense", "size": "1M"}, "nonsense"),
        ({"rw": "write", "size": "1M", "directory": "/nowhere"}, "/nowhere is not a directory"),
    ],
)
def test_failure_is_told_in_words_of_fio(folders, options, words):
    data, keep = folders
    with pytest.raises(CommandError, match=words):
        run_fio("bad", {"job": options}, directory=data, keep=keep, runner=_RUNNER)
    assert (keep / "bad.fio").exists()


@pytest.mark.needs("root")
def test_full_file_system_is_told(folders):
    data, keep = folders
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", data], check=True)
    try:
        with pytest.raises(CommandError, match="No space left on device") as caught:
            run_fio("full", {"job": {"rw": "write", "size": "4M"}}, directory=data, keep=keep, runner=_RUNNER)
    finally:
        subprocess.run(["umount", data], check=True)
    assert "--size" in caught.value.hint
