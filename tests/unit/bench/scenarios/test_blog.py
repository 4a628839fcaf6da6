"""The load of blogs: our engine as a program, and the scenario on a plain folder."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapmgr.bench.load.blogengine import BLOG_BYTES
from snapmgr.bench.load.blogrun import COMMENTED, READ, REWRITTEN, WRITTEN, BlogRun
from snapmgr.bench.scenarios import blog
from snapmgr.system.command import PROGRAM_PATH
from support.bench.plain import PlainBench, completed
from support.storage import work_folder
from support.thoroughness import CAMPAIGN

CREW = ("--writers=2", "--rewriters=1", "--commenters=1", "--readers=3")
SMALL = {"writers": 1, "rewriters": 1, "commenters": 1, "readers": 2, "interval_s": 1, "intervals": 1}
_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder():
    # In memory: the disk is not the subject here.
    with work_folder(_MEMORY if os.access(_MEMORY, os.W_OK) else None) as made:
        yield made


def engine(folder, *options):
    return [sys.executable, "-P", "-m", "snapmgr.bench.load.blogengine", f"--folder={folder}", *options]


def call(folder, *options, **more):
    return subprocess.run(
        engine(folder, *options), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **more
    )


def load(folder, *options):
    done = call(folder, *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))


def members(group):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(stat.parent.name)
    return found


def test_filled_tree_has_each_blog_as_the_seed_says(folder):
    first, second = folder / "first", folder / "second"
    for tree in (first, second):
        tree.mkdir()
        document = load(tree, "--fill", "--blogs=3", "--writers=2", "--seed=4")
        assert document["writes"] == 3
        assert not document["wrapped"]
    assert sorted(path.name for path in first.iterdir()) == ["blog-0", "blog-1", "blog-2"]
    assert names(first) == names(second)
    for number in range(3):
        here = first / f"blog-{number}"
        counts = {kind: len(list(here.glob(f"{kind}-*"))) for kind in ("article", "picture", "comment")}
        assert all(1 <= count <= 100 for count in counts.values())
        # Numbered without a hole.
        assert (here / f"article-{counts['article']}.xml").exists()
        for kind, low, high in (("article", 1024, 32768), ("picture", 8192, 65536), ("comment", 2048, 10240)):
            assert all(low <= path.stat().st_size < high for path in here.glob(f"{kind}-*"))
    assert sum(document["counts"]["bytes_written"]) == sum((second / name).stat().st_size for name in names(second))


def test_data_cannot_be_compressed_unless_asked_for(folder):
    import zlib  # noqa: PLC0415

    for option, compressible in (("--seed=1", False), ("--zeros", True)):
        tree = folder / option.strip("-")
        tree.mkdir()
        load(tree, "--fill", "--blogs=1", "--writers=1", option)
        whole = b"".join((tree / name).read_bytes() for name in names(tree))
        assert (len(zlib.compress(whole, 1)) < len(whole) / 2) is compressible


def test_counts_are_what_was_done(folder):
    document = load(folder, "--blogs=500", *CREW, "--seconds=0.8", "--window=0.2", "--seed=2")
    counts = document["counts"]
    assert len(document["ends_s"]) == 4
    assert all(len(values) == 4 for values in counts.values())
    assert document["writes"] == sum(counts["blogs_written"]) > 0
    assert document["reads"] == sum(counts["blogs_read"]) > 0
    for name in (*READ, *WRITTEN, *REWRITTEN, *COMMENTED):
        assert sum(counts[name]) > 0, name
    there = names(folder)
    assert not [name for name in there if name.endswith(".tmp")]
    # What writers finished after the last reading of the counters is not counted, and one blog each may be half done.
    articles = [name for name in there if "/article-" in name]
    assert len(articles) <= sum(counts["articles_written"]) + sum(counts["articles_rewritten"]) + 60
    assert len(articles) >= sum(counts["articles_written"])


def test_tree_is_bounded(folder):
    load(folder, "--fill", "--blogs=2", "--writers=1")
    document = load(folder, "--filled", "--blogs=2", *CREW, "--seconds=0.5", "--window=0.5")
    assert document["wrapped"]
    assert document["writes"] > 2
    assert sorted(path.name for path in folder.iterdir()) == ["blog-0", "blog-1"]
    assert sum((folder / name).stat().st_size for name in names(folder)) < 2.3 * BLOG_BYTES


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_interrupted_engine_leaves_no_worker(folder, number, code):
    process = subprocess.Popen(
        engine(folder, "--blogs=50", *CREW, "--seconds=60"), start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        _wait(lambda: names(folder))
        assert len(members(process.pid)) == 8
        os.kill(process.pid, number)
        assert process.wait(20) == code
        assert process.stdout.read() == b""
        _wait(lambda: not members(process.pid))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def test_workers_end_when_the_engine_was_killed(folder):
    process = subprocess.Popen(engine(folder, "--blogs=50", *CREW, "--seconds=60"), start_new_session=True)
    try:
        _wait(lambda: names(folder))
        process.kill()
        process.wait()
        _wait(lambda: not members(process.pid))
    finally:
        for pid in members(process.pid):
            os.kill(int(pid), signal.SIGKILL)


def _wait(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_file_that_cannot_be_written_is_told(folder):
    # A size limit fails as a full disk does, without one; SIGXFSZ is ignored by Python.
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))

    done = call(folder, "--blogs=50", *CREW, "--seconds=30", preexec_fn=limit)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("a file could not be used: ")
    assert "File too large" in done.stderr


@pytest.mark.parametrize("options", [["--blogs=0"], ["--blogs=3", "--writers=0"], ["--blogs=3", "--window=0"], []])
def test_wrong_options(folder, options):
    assert call(folder, *options).returncode == 2


def run_of(writes, reads):
    counts = {"articles_written": tuple(writes), "articles_read": tuple(reads)}
    return BlogRun(ends_s=tuple(range(1, len(writes) + 1)), counts=counts, writes=0, reads=0)


def test_stalls():
    stalls = run_of([1, 0, 0, 5, 0, 0], [0, 0, 1, 1, 1, 0]).stalls()
    assert (stalls.without_write, stalls.without_read, stalls.without_either) == (4, 3, 2)
    assert (stalls.longest_write_s, stalls.longest_read_s, stalls.longest_either_s) == (2, 2, 1)
    assert run_of([1, 1], [1, 1]).stalls().longest_write_s == 0


def test_intervals_leave_out_the_rest():
    assert run_of([1, 2, 3, 4, 5], [0] * 5).intervals(WRITTEN, 2) == (3, 7)


# The other variant is tried on real file systems.
@pytest.mark.parametrize("variant", ["printed", *(["repaired"] if CAMPAIGN else [])])
def test_scenario(folder, variant):
    scenario = blog.scenario
    parameters = completed(scenario, size_bytes=3 * BLOG_BYTES, variant=variant, **SMALL)
    bench = PlainBench(folder, parameters)
    outcome = scenario.run(bench)
    assert [check for check in outcome.checks if not check.ok] == []
    assert {check.name for check in outcome.checks} == {
        "the load changed the origin",
        "the snapshot holds what the tree held",
    }
    known = {info.name for info in scenario.metrics}
    assert set(outcome.metrics) <= known
    # A folder has no device to count at.
    assert known - set(outcome.metrics) <= {
        "written_per_byte_before",
        "written_per_byte_after",
        "reads_kept",
        "writes_kept",
    }
    assert outcome.metrics["reads_after"] > 0
    assert set(outcome.series) == set(outcome.axes)
    for name, values in outcome.series.items():
        assert len(values) == len(outcome.axes[name]["x"]) == 1
    assert sum(outcome.series["read_after"]) > sum(outcome.series["blogs_read_after"])
    assert f"blogbench, which is not installed (searched in {PROGRAM_PATH})" in outcome.notes[0]
    filled = [argv for argv in bench.commands if "--fill" in argv]
    assert len(filled) == (variant == "repaired")
    json.dumps([outcome.metrics, outcome.series, outcome.axes, outcome.notes])


class Scribble:
    """A load that is quick."""

    note = "scribbles"

    def __init__(self, _bench, tree, _why):
        self.tree = tree

    def fill(self):
        self.run(0)

    def run(self, turn):
        (self.tree / "blog-1").write_text(f"{turn}")
        return run_of([1], [turn])


def test_snapshot_that_is_none_is_found(folder, monkeypatch):
    monkeypatch.setattr(blog, "_Own", Scribble)
    bench = PlainBench(folder, completed(blog.scenario, size_bytes=2 * BLOG_BYTES, variant="printed", **SMALL))
    bench.shares = True
    (wrong,) = [check for check in blog.scenario.run(bench).checks if not check.ok]
    assert wrong.name == "the snapshot holds what the tree held"
    assert "differs" in wrong.detail


def test_lost_snapshot_is_found(folder, monkeypatch):
    monkeypatch.setattr(blog, "_Own", Scribble)
    bench = PlainBench(folder, completed(blog.scenario, size_bytes=2 * BLOG_BYTES, variant="printed", **SMALL))
    bench.overflows = True
    (wrong,) = [check for check in blog.scenario.run(bench).checks if not check.ok]
    assert "its room ran full" in wrong.detail


def test_control_has_no_snapshot(folder, monkeypatch):
    monkeypatch.setattr(blog, "_Own", Scribble)
    bench = PlainBench(folder, completed(blog.scenario, size_bytes=BLOG_BYTES, **SMALL), backend=None)
    outcome = blog.scenario.run(bench)
    assert "create_s" not in outcome.metrics
    assert outcome.metrics["longest_without_read_after_s"] == 1
    assert outcome.metrics["intervals_without_write_after"] == 0
    assert [check for check in outcome.checks if not check.ok] == []
    assert any(note.startswith("a control") for note in outcome.notes)


# Not the program, only how it reads its arguments, and what it would leave and print.
BLOGBENCH = r"""#!/usr/bin/python3
import getopt, pathlib, sys, time
usage = "blogbench 1.1 - usage"
try:
    # --rewriters takes no argument in its table of options.
    given, _ = getopt.getopt(sys.argv[1:], "c:d:hi:r:W:s:w:", ["directory=", "writers=", "rewriters", "help"])
except getopt.GetoptError:
    print(usage)
    sys.exit(0)
given = dict(given)
assert int(given["-W"]) == 1 and int(given["-r"]) == 2 and given["-s"] == given["-i"] == "1"
blog = pathlib.Path(given["-d"], "blog-1")
blog.mkdir(exist_ok=True)
(blog / "article-1.xml").write_text(str(time.time_ns()))
BROKEN
print("\n  Nb blogs   R articles\n         4           10             3   2   1   6   5")
print("Final score for writes:             4\nFinal score for reads :            40")
"""


def install_blogbench(folder, monkeypatch, broken=""):
    fake = folder / "blogbench"
    fake.write_text(BLOGBENCH.replace("BROKEN", broken))
    fake.chmod(0o755)
    monkeypatch.setattr("snapmgr.system.command.PROGRAM_PATH", f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin")


def test_blogbench_is_run_where_it_is_installed(folder, monkeypatch):
    bench = PlainBench(folder, completed(blog.scenario, size_bytes=BLOG_BYTES, variant="printed", **SMALL))
    install_blogbench(folder, monkeypatch)
    outcome = blog.scenario.run(bench)
    assert [check for check in outcome.checks if not check.ok] == []
    assert (outcome.metrics["reads_after"], outcome.metrics["writes_after"]) == (40, 4)
    assert outcome.series["read_after"] == (18,)
    assert outcome.series["written_before"] == (4,)
    assert outcome.metrics["files_written_after"] == sum(
        sum(outcome.series.get(f"{what}_after", ())) for what in ("written", "rewritten", "commented")
    )
    assert "rewritten_before" not in outcome.series
    assert outcome.notes[0].startswith("the load is the program blogbench")
    assert [argv[0] for argv in bench.commands] == ["blogbench", "blogbench"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("print(usage); sys.exit(0)", "blogbench printed 0 rows and 0 of its 2 scores"),
        ("sys.exit(1)", "failed (exit code 1)"),
        ("print('         4           10             3   2   1   6   5'); sys.exit(0)", "1 rows and 0 of its 2 scores"),
    ],
)
def test_a_blogbench_that_does_not_work_is_told_and_our_own_load_runs(folder, monkeypatch, broken, said):
    bench = PlainBench(folder, completed(blog.scenario, size_bytes=BLOG_BYTES, variant="printed", **SMALL))
    install_blogbench(folder, monkeypatch, broken)
    outcome = blog.scenario.run(bench)
    assert outcome.notes[0].startswith("the load is snapmgr's own")
    assert "which is installed but did not work (" in outcome.notes[0]
    assert said in outcome.notes[0]
    assert [check for check in outcome.checks if not check.ok] == []
    assert sum(argv[0] == "blogbench" for argv in bench.commands) == 1
    assert outcome.metrics["reads_after"] > 0
