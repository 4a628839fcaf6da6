"""A real mount is recorded: nothing is lost unnoticed, and the sums are those of the client's own profiler."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from snapmgr.cli.main import main
from snapmgr.trace.analysis import analyse, described, facts_of
from snapmgr.trace.mounted import find_mount
from snapmgr.trace.reading import read_trace
from snapmgr.trace.sampling import series
from snapmgr.trace.verdict import judge
from support.juicefs import juicefs_program, juicefs_volume
from support.processes import wait_until

pytestmark = pytest.mark.needs("root", "juicefs")

SNAPMGR = str(Path(sys.executable).with_name("snapmgr"))
LIMIT_S = 60
WORK = """
import os, sys
folder, count = sys.argv[1], int(sys.argv[2])
fd = os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT, 0o644)
for number in range(count):
    os.pwrite(fd, b"x" * 4096, number % 16 * 4096)
os.fsync(fd)
os.close(fd)
os.rename(f"{folder}/file", f"{folder}/done")
sys.exit(3)
"""
# Reads past the page cache, so that each read is the client's.
BUSY = """
import mmap, os, sys
buffer = mmap.mmap(-1, 4096)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
while not os.path.exists(sys.argv[2]):
    for number in range(50):
        os.preadv(fd, [buffer], number * 4096)
sys.exit(5)
"""


@pytest.fixture(scope="module")
def volume():
    with juicefs_volume(base=Path("/dev/shm")) as volume:
        yield volume


@pytest.fixture
def recording(volume, tmp_path):
    """A recorder that runs until the test ends it."""
    path = tmp_path / "log.gz"
    argv = [SNAPMGR, "trace", "record", str(volume.point), "-o", str(path)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            # The header is written when the log is open.
            wait_until(lambda: path.exists() and path.stat().st_size > 0, LIMIT_S)
            yield process, path
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def end(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return out.decode().strip()


def show(path, *options):
    done = subprocess.run(
        [SNAPMGR, "trace", "show", str(path), *options], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.stdout


def test_a_command_is_recorded_and_its_exit_code_passed_on(volume, tmp_path, capfd):
    path = tmp_path / "log.gz"
    folder = volume.point / "command"
    folder.mkdir()
    work = ["--", sys.executable, "-c", WORK, str(folder), "500"]
    assert main(["trace", "record", str(folder), "-o", str(path), *work]) == 3
    assert capfd.readouterr().out.splitlines() == [str(path)]
    assert path.stat().st_mode & 0o777 == 0o600
    trace = read_trace(str(path))
    assert (trace.truncated, trace.operations.skipped) == (None, 0)
    assert trace.trailer["stopped_by"] == "command"
    assert (trace.trailer["command_exit"], trace.trailer["complete"]) == (3, True)
    assert trace.header["volume"] == volume.name
    # Of the command its name and its folder: a password may be among its other arguments.
    assert trace.header["command"] == Path(sys.executable).name
    assert trace.header["folder"] == str(folder)
    assert "os.pwrite" not in json.dumps(trace.header)
    assert described(trace).startswith(f"{Path(sys.executable).name} on {folder}, volume {volume.name}, JuiceFS 1.")
    assert "mounted with cache-size" in described(trace)
    analysis = analyse(trace)
    assert analysis.missing == {}
    counts = {total.key: total for total in analysis.totals["operation"]}
    assert (counts["write"].count, counts["write"].size_bytes) == (500, 500 * 4096)
    assert counts["rename"].count == counts["fsync"].count == 1
    written = next(total for total in analysis.totals["file"] if total.key.endswith("/done") or total.key == "done")
    assert written.size_bytes == 500 * 4096
    # The recorder's own readings of the counters are not the program's.
    assert all(total.key != ".stats" for total in analysis.totals["file"])
    put = next(one for one in series(trace) if one.name == "PUT")
    assert sum(value * (end - begin) / 1e6 for begin, end, value in put.steps) == pytest.approx(
        analysis.counted.put_bytes, abs=1 << 20
    )
    first_us, last_us = put.steps[0][0], put.steps[-1][1]
    assert abs(first_us - analysis.first_us) < 2_000_000
    assert last_us - first_us < 2_000_000 + analysis.wall_s * 1e6
    # The client's counters and its log agree.
    counted = analysis.counted.operations
    logged = Counter(trace.operations.names[name] for name in trace.operations.name)
    kinds = ("write", "create", "fsync", "rename", "flush")
    assert {kind: counted[kind] for kind in kinds} == {"write": 500, "create": 1, "fsync": 1, "rename": 1} | {
        "flush": logged["flush"] - 1  # the closing of the counters themselves, when they were read the last time
    }
    # And a file that is there is left as it is.
    before = path.read_bytes()
    assert main(["trace", "record", str(folder), "-o", str(path), *work]) == 2
    assert path.read_bytes() == before


def profiled(log):
    """Let the client's profiler add a log up; it was seen to hang, once in some hundred runs."""
    for patience_s in (20, 40, None):
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                [juicefs_program(), "profile", str(log), "--interval", "0"],
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=patience_s,
            )
    raise AssertionError("unreachable")


def test_the_sums_are_those_of_the_client_s_profiler(volume, recording, tmp_path):
    process, path = recording
    (volume.point / "profiled").mkdir()
    subprocess.run([sys.executable, "-c", WORK, str(volume.point / "profiled"), "2000"], check=False)
    for entry in os.scandir(volume.point):
        entry.stat()
    assert end(process) == str(path)
    plain = tmp_path / "plain.log"
    trace = read_trace(str(path))
    # Without what the recorder itself did: reading the counters.
    own = rb"pid:(%d|%d)\]|\(%d[,)]" % (trace.header["thread"], trace.trailer["sampler"], trace.header["stats_inode"])
    lines = zlib.decompress(path.read_bytes(), 31).splitlines(keepends=True)
    plain.write_bytes(b"".join(line for line in lines if not re.search(own, line)))
    done = profiled(plain)
    rows = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 5]
    profile = {name: (int(count), int(total)) for name, count, _, total, _ in rows if count.isdigit()}
    document = json.loads(show(path, "--json", "--top", "100"))
    totals = {total["key"]: total for total in document["analysis"]["totals"]["operation"]}
    assert {name: count for name, (count, _) in profile.items()} == {
        name: total["count"] for name, total in totals.items()
    }
    # It rounds each time down from a float.
    for name, (count, total_us) in profile.items():
        assert 0 <= totals[name]["total_us"] - total_us <= count, name
    assert totals["write"]["count"] == 2000
    assert document["analysis"]["missing"] == {}
    assert document["verdict"]["findings"][0]["bottleneck"] != "unknown"


def test_what_a_slow_reader_loses_is_found(volume, recording, tmp_path):
    process, path = recording
    (volume.point / "lost").mkdir()
    process.send_signal(signal.SIGSTOP)
    # The client keeps 10,240 lines.
    subprocess.run([sys.executable, "-c", WORK, str(volume.point / "lost"), "14000"], check=False)
    process.send_signal(signal.SIGCONT)
    end(process)
    analysis = analyse(read_trace(str(path)))
    assert 2000 < analysis.missing["write"] < 14_000
    written = next(total.count for total in analysis.totals["operation"] if total.key == "write")
    assert written + analysis.missing["write"] == 14_000
    shown = show(path)
    assert f"{analysis.missing['write']} write" in shown
    assert "there is no verdict" in shown
    # Without the counters, as cat would have saved it: no verdict that takes the lost time for the program's own.
    plain = tmp_path / "plain.log"
    plain.write_bytes(b"".join(re.findall(rb"(?m)^[^#].*\n", zlib.decompress(path.read_bytes(), 31))))
    found = read_trace(str(plain))
    analysis = analyse(found)
    assert analysis.missing is None
    verdict = judge(facts_of(found, analysis))
    assert verdict.bottleneck == "unknown" or verdict.condition
    assert "nothing to tune" not in show(plain)


def test_a_recorder_that_was_killed_leaves_what_it_read(volume, recording):
    process, path = recording
    (volume.point / "killed").mkdir()
    subprocess.run([sys.executable, "-c", WORK, str(volume.point / "killed"), "3000"], check=False)
    # A block is written out after a second; keep it reading.
    size = path.stat().st_size
    wait_until(lambda: (volume.point / "killed").stat() and path.stat().st_size > size + 1000, LIMIT_S)
    process.kill()
    process.wait()
    trace = read_trace(str(path))
    assert trace.truncated == "cut off"
    assert trace.trailer is None
    assert "write" in trace.operations.names
    assert analyse(trace).missing is None
    assert "write" in show(path)


def test_bounds_end_the_recording_and_never_the_command(volume, tmp_path):
    path, done = tmp_path / "log.gz", tmp_path / "done"
    (volume.point / "busy").write_bytes(os.urandom(1 << 20))
    # It is busy when the recording ends, in the middle of a line.
    busy = ["--", sys.executable, "-c", BUSY, str(volume.point / "busy"), str(done)]
    argv = [SNAPMGR, "trace", "record", str(volume.point), "-o", str(path), "--for", "1s", *busy]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: path.exists() and read_trace(str(path)).trailer is not None, LIMIT_S)
            assert process.poll() is None
            done.touch()
            assert process.wait(LIMIT_S) == 5
        finally:
            done.touch()
    trace = read_trace(str(path))
    assert trace.trailer["stopped_by"] == "time"
    assert (trace.operations.skipped, trace.truncated) == (0, None)
    analysis = analyse(trace)
    assert analysis.missing == {}
    assert analysis.counted.operations["read"] > 100


def test_a_command_that_a_signal_ends_is_told_as_a_shell_would(volume, tmp_path):
    path = tmp_path / "log.gz"
    argv = [SNAPMGR, "trace", "record", str(volume.point), "-o", str(path), "--", "sleep", "600"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _children(process.pid), LIMIT_S)
            # The recorder passes it on, and waits.
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        finally:
            for pid in [*_children(process.pid), process.pid] if process.poll() is None else []:
                os.kill(int(pid), signal.SIGKILL)
    assert read_trace(str(path)).trailer["command_exit"] == 128 + signal.SIGTERM


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_what_cannot_be_recorded_is_refused(volume, tmp_path, capsys):
    assert main(["trace", "record", str(tmp_path), "-o", str(tmp_path / "a.gz")]) == 2
    assert "is not on a JuiceFS mount" in capsys.readouterr().err
    assert main(["trace", "record", str(volume.point), "-o", str(volume.point / "a.gz")]) == 2
    assert "would record itself" in capsys.readouterr().err
    assert main(["trace", "record", str(volume.point), "-o", str(tmp_path / "b.gz"), "--", "no-such-program"]) == 7
    assert list(tmp_path.iterdir()) == []
    assert not (volume.point / "a.gz").exists()


def test_a_mount_tells_of_itself_no_key(volume):
    found = find_mount(volume.point)
    assert (found.volume, found.writeback) == (volume.name, False)
    assert find_mount(volume.point / ".").point == volume.point
    before = found.counters()
    (volume.point / "touched").touch()
    assert found.counters()["juicefs_fuse_ops_total_create"] == before.get("juicefs_fuse_ops_total_create", 0) + 1
