"""`snapmgr bench run` as a whole on real file systems: the smoke profile, runs that are killed, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from snapmgr.bench.device.mark import MIB
from snapmgr.bench.device.target import opened_target
from snapmgr.bench.model import MetricInfo, Needs, Outcome, Parameters, Stack
from snapmgr.bench.results.samples import Results, read
from snapmgr.bench.run.conductor import Conductor
from snapmgr.bench.run.plan import Options, make_plan
from snapmgr.bench.storage.stacks import STACKS, missing_requirements
from snapmgr.contract.errors import CatalogError, CommandError, ConfigError
from support.bench.documents import bench_run
from support.bench.fakes import STACKS as FAKE_STACKS
from support.bench.fakes import FakeBench, FakeScenario, FakeTarget, fake_counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Reason
    from snapmgr.bench.model import Workbench
    from snapmgr.bench.run.conductor import RunSummary

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4", "fio")

_WAIT_S = 60.0


class Bench:
    """The command line in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"

    def argv(self, *words: str) -> list[str]:
        on = f"loop:1G:{self.folder}"
        shared = ["--profile", "smoke", "--size", "32M", "--on", on, "--budget", "10m", "-o", str(self.results)]
        return [sys.executable, "-m", "snapmgr", "bench", "run", "random-update", *shared, *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*words), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    def samples(self) -> list[dict[str, Any]]:
        return read([self.results]).samples

    def interrupted(self, number: signal.Signals, *words: str, samples: int, doing: str) -> tuple[int, str]:
        """Start it, send a signal when there are so many samples and `doing` is told, return how it ended."""
        argv = self.argv(*words)
        argv.insert(3, "--verbose")
        with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            said = []
            try:
                assert process.stderr is not None
                for line in process.stderr:
                    said.append(line)
                    if doing in line and len(list(self.results.glob("0*.json"))) == samples:
                        process.send_signal(number)
                        break
                said += list(process.stderr)
                return process.wait(_WAIT_S), "".join(said)
            finally:
                process.kill()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)
    assert _loops(tmp_path) == []


def _loops(folder: Path) -> list[str]:
    """Return what still uses a file of a folder; what was killed takes a moment to go."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
        left = [text for text in backing if str(folder) in text]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.timeout(240)
def test_smoke_on_btrfs_xfs_and_ext4(bench: Bench) -> None:
    stacks = "btrfs,xfs-reflink,ext4"
    done = bench.run("--stacks", stacks, "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    # A pilot on each, a block of all with one of them twice.
    assert (document["measured"], document["failed"], document["given_up"]) == (3 + 4, 0, [])
    (scenario,) = document["found"]["scenarios"]
    assert sorted(scenario["stacks"]) == sorted(stacks.split(","))
    by_name = {metric["metric"]: {cell["stack"] for cell in metric["cells"]} for metric in scenario["metrics"]}
    assert by_name["update_first_s"] == by_name["read_after_bytes_s"] == set(stacks.split(","))
    assert by_name["create_s"] == {"btrfs", "xfs-reflink"}
    for sample in bench.samples():
        assert sample["checks"] or sample["stack"] == "ext4"
        assert all(check["ok"] for check in sample["checks"])
        assert any(argv[0].startswith("mkfs.") for argv in sample["commands"])
        assert "rw=" in "".join(sample["jobs"].values())
        assert sample["spent"]["written_bytes"] >= 32 * MIB
        assert sample["host"]["target"]["kind"] == "loop"
    page = Path(document["report"]).read_text()
    assert "<svg" in page
    assert "indicative" in page
    text = "".join(path.read_text() for path in bench.results.iterdir())
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    assert str(bench.folder) not in "".join(str(sample["commands"]) for sample in bench.samples())


def test_killed_then_interrupted_then_done(bench: Bench) -> None:
    words = ("--stacks", "ext4", "--repeats", "1")
    code, _ = bench.interrupted(signal.SIGKILL, *words, samples=0, doing="fio")
    assert code == -signal.SIGKILL
    assert _loops(bench.folder) == []
    code, said = bench.interrupted(signal.SIGINT, *words, samples=1, doing="reads in order, before")
    assert code == 130, said
    assert "1 samples are kept" in said
    assert _loops(bench.folder) == []
    assert not (bench.results / ".work").exists()
    kept = {path.name: path.read_bytes() for path in bench.results.glob("0*.json")}
    done = bench.run(*words)
    assert done.returncode == 0, done.stderr
    assert (bench.samples()[0]["block"], bench.samples()[0]["kind"]) == (0, "pilot")
    assert sorted(one["kind"] for one in bench.samples()) == ["a/a", "measured", "pilot"]
    assert kept.items() <= {path.name: path.read_bytes() for path in bench.results.glob("0*.json")}.items()


def test_two_runs_do_not_share_a_folder(bench: Bench) -> None:
    results = Results(bench.results)
    with results.locked():
        results.begin(bench_run())
        done = bench.run("--stacks", "ext4")
    # Either is said, and nothing measured: this is no run that these arguments began.
    assert done.returncode in {2, 3}, done.stderr
    assert list(bench.results.glob("0*.json")) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", point], check=True)
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.mark.parametrize("end", ["full", "read-only"])
def test_a_results_disk_that_ends_is_not_charged_to_a_storage(small: Path, end: str) -> None:
    def fail(_stack: str) -> Exception | None:
        if len(list(results.folder.glob("0*.json"))) < 2:
            return None
        if end == "full":
            # As a storage's program would, in the folder for small files.
            with suppress(OSError), (results.folder / ".work" / "log").open("wb", buffering=0) as log:
                while log.write(bytes(1 << 16)):
                    pass
        else:
            subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        return CommandError("fio: it cannot write its log")

    plan = make_plan(
        Options(scenarios=("work",), stacks=("one", "two"), profile="smoke", repeats=1),
        scenarios=(FakeScenario(),),
        stacks=FAKE_STACKS,
        missing_requirements=lambda _: (),
        memory_bytes=1 << 60,
        room_bytes=1 << 60,
    )
    results, bench = Results(small / "results"), FakeBench()

    def work() -> RunSummary:
        with results.locked():
            if results.run() is None:
                results.begin(bench_run(id="r"))
            return Conductor(plan, results, "r", target=FakeTarget(), host={}, bench=bench, counted=fake_counted).run()

    bench.fail = fail
    with pytest.raises(CatalogError, match=f"cannot write {results.folder}: ") as raised:
        work()
    assert "to continue, repeat the command" in (raised.value.hint or "")
    if end == "read-only":
        # And so it is refused from the start.
        with pytest.raises(ConfigError, match="Read-only file system"):
            work()
        with pytest.raises(ConfigError, match="Read-only file system"), Results(small / "other").locked():
            pytest.fail("it is written to")
        subprocess.run(["mount", "-o", "remount,rw", small], check=True)
    assert [sample["failure"] for sample in results.samples()] == ["", ""]
    bench.fail = lambda _: None
    assert (work().measured, work().measured) == (3, 0)


class Filling:
    """Writes more than there is."""

    name = "filling"
    title = "What happens when the disk is full?"
    variants = ()
    metrics = (MetricInfo(name="fill_s", title="Fill", unit="s", better="less", headline=True),)

    def missing(self) -> tuple[Reason, ...]:
        return ()

    def suits(self, stack: Stack) -> str | None:  # noqa: ARG002
        return None

    def needs(self, parameters: Parameters) -> Needs:
        return Needs(space_bytes=parameters.size_bytes, seconds=1)

    def parameters(self, given: Parameters) -> Parameters:
        return given

    def run(self, bench: Workbench) -> Outcome:
        filled = bench.fio("fill", {"fill": {"rw": "write", "bs": "1M", "size": "1G", "filename": "data"}})
        return Outcome(metrics={"fill_s": filled.document["jobs"][0]["job_runtime"] / 1000})


def test_a_full_disk_fails_the_samples_and_then_the_storage_with_fios_own_words(tmp_path: Path) -> None:
    plan = make_plan(
        Options(scenarios=("filling",), stacks=("ext4",), profile="smoke", repeats=2, budget_s=600.0),
        scenarios=(Filling(),),
        stacks=STACKS,
        missing_requirements=missing_requirements,
        memory_bytes=1 << 60,
        room_bytes=384 * MIB,
    )
    results = Results(tmp_path / "results")
    with (
        results.locked(),
        opened_target(f"loop:384M:{tmp_path}", size_bytes=None, wipe=None, written=False) as target,
    ):
        results.begin(bench_run(id="r"))
        ended = Conductor(plan, results, "r", target=target, host={}).run()
    assert len(ended.given_up) == 1
    assert ended.failed == ended.measured == 3
    assert all("No space left on device" in sample["failure"] for sample in results.samples())
    assert all(sample["commands"] for sample in results.samples())
    assert _loops(tmp_path) == []
