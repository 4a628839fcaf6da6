"""How long the lock is held for an LVM snapshot, beside bare ``lvcreate -s``; every snapshot's copy is checked.

For classic and thin volumes with ext4 and XFS, interleaved, so that the machine's moods hit all: a backup; the same
lvcreate by a shell of its own while a client like any other holds the same lock; the same without a lock. Each backup's
copy is started and compared with its recorded position and with what the writers were told. Boots a guest
(`./run guest`) where there is no device-mapper; else SNAPMGR_TEST_DEV must name a blank disk. Prints tables and, with
--json FILE, the raw samples.

    ./run measure lvm --snapshots 20
    ./run measure lvm --snapshots 50 --no-check --kind thin --fs xfs
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pymysql

from bench.inguest import enter_guest
from snapmgr.access.attach import attached, data_path
from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from snapmgr.system.command import clean_environment
from snapmgr_lvm.armed import LvmArmed
from support.exactness import Taken, check_copy
from support.load import write_load
from support.lvm import run, volume_group
from support.lvmscene import lvm_scene
from support.samples import quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.load import WriteLoad
    from support.lvmscene import LvmScene

_LABELS = {
    "bare": "bare lvcreate -s, no lock",
    "bare_locked": "bare lvcreate -s, writers locked out",
    "bare_hold": "lock held by the bare client",
    "call": "lvcreate in a backup, in the helper",
    "hold": "lock held by a backup",
    "over": "hold less that call",
    "wait": "lock asked for to granted",
    "backup": "whole backup, in process",
    "stall_bare": "writers' worst wait, bare client",
    "stall": "writers' worst wait, backup",
}
_CALL_TIMEOUT_S = 60.0
_WAITED_TOO_LONG = 1205
# A process that only starts programs and reads the clock: $EPOCHREALTIME has microseconds.
_SHELL = """
while IFS= read -r line; do
  start=$EPOCHREALTIME
  eval "$line" >/dev/null 2>"$0"
  code=$?
  printf '%s %s %s\\n' "$code" "$start" "$EPOCHREALTIME"
done
"""


class Shell:
    """A small process that runs commands and says how long they took."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        # As snapmgr runs programs: LVM looks at the environment.
        self._process = subprocess.Popen(
            ["bash", "-c", _SHELL, str(errors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )

    def seconds(self, *argv: str) -> float:
        """Run a program to its successful end and return how long it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(argv) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _CALL_TIMEOUT_S)[0]:
            raise TimeoutError(f"{argv} did not end")
        code, start, end = self._process.stdout.readline().split()
        if code != "0":
            raise RuntimeError(f"{argv}: {self._errors.read_text()}")
        return float(end) - float(start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def watched_commands(seen: list[tuple[str, ...]]) -> Iterator[None]:
    """Keep the lvcreate of each backup, so that the bare one has the same options."""
    init = LvmArmed.__init__

    def watched(self: LvmArmed, *args: object, **named: object) -> None:
        init(self, *args, **named)  # type: ignore[arg-type]
        seen.append(self._members[0].argv)

    LvmArmed.__init__ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        LvmArmed.__init__ = init  # type: ignore[method-assign]


def _lock(cursor: pymysql.cursors.Cursor) -> None:
    """Take the lock, giving way to a circle of waiting writers as snapmgr does (snapmgr.mysql.lock.quiesce)."""
    cursor.execute("SET SESSION lock_wait_timeout = 1")
    while True:
        try:
            cursor.execute("FLUSH TABLES WITH READ LOCK")
        except pymysql.err.OperationalError as error:
            if error.args[0] != _WAITED_TOO_LONG:
                raise
        else:
            return


class Measurement:
    """One kind of volume with one file system, under load."""

    def __init__(self, scene: LvmScene, load: WriteLoad, shell: Shell, *, check: bool) -> None:
        self.samples: dict[str, list[float]] = {name: [] for name in _LABELS}
        self.exact = 0
        self._scene = scene
        self._load = load
        self._shell = shell
        self._check = check
        self._seen: list[tuple[str, ...]] = []
        self._ctx = scene.context()

    def _add(self, name: str, value_s: float) -> None:
        self.samples[name].append(value_s)

    def backup(self) -> None:
        """Take a snapshot by a backup, check it, delete it."""
        before = self._load.acknowledged()
        start = time.monotonic_ns()
        with watched_commands(self._seen):
            manifest = backup(self._ctx, self._ctx.config.job("demo"))
        end = time.monotonic_ns()
        after = self._load.acknowledged()
        assert manifest.quiesce is not None
        self._add("hold", manifest.quiesce.held_s)
        self._add("call", manifest.members[0].call_s)
        self._add("over", manifest.quiesce.held_s - manifest.members[0].call_s)
        self._add("wait", manifest.quiesce.waited_s)
        self._add("backup", (end - start) / 1e9)
        time.sleep(0.1)
        self._add("stall", self._load.statistics(since_ns=start, until_ns=end).worst_s)
        if self._check:
            with attached(self._ctx, self._ctx.catalog.load(manifest.id)) as lease:
                one = Taken(manifest=manifest, before=before, after=after)
                check_copy(data_path(lease), one, self._scene.server.kind)
            self.exact += 1
        delete(self._ctx, manifest)

    def _bare(self) -> float:
        argv = list(self._seen[-1])
        argv[argv.index("--name") + 1] = "bare"
        return self._shell.seconds(*argv)

    def _remove(self) -> None:
        run("lvremove", "--yes", f"{self._scene.group.name}/bare")

    def bare(self) -> None:
        """Run the same lvcreate beside the writers."""
        os.sync()
        self._add("bare", self._bare())
        self._remove()

    def bare_locked(self, connection: pymysql.connections.Connection[pymysql.cursors.Cursor]) -> None:
        """Run it under the lock of a plain client: lock, lvcreate, unlock."""
        start = time.monotonic_ns()
        os.sync()
        with connection.cursor() as cursor:
            _lock(cursor)
            granted = time.monotonic()
            took = self._bare()
            cursor.execute("UNLOCK TABLES")
            released = time.monotonic()
        end = time.monotonic_ns()
        self._add("bare_locked", took)
        self._add("bare_hold", released - granted)
        time.sleep(0.1)
        self._add("stall_bare", self._load.statistics(since_ns=start, until_ns=end).worst_s)
        self._remove()

    def run(self, count: int) -> None:
        """Measure so many of each."""
        with self._scene.server.connect() as connection:
            steps: list[Callable[[], None]] = [self.backup, lambda: self.bare_locked(connection), self.bare]
            for number in range(count):
                # The first one is a backup, whose command the others take.
                for step in steps if number % 2 == 0 else reversed(steps):
                    step()
                    self._load.check_alive()
                    time.sleep(0.1)


def print_table(title: str, samples: dict[str, list[float]]) -> None:
    """Print the quantiles of what was measured, in milliseconds."""
    print(f"{title:44}{'p50':>9}{'p95':>9}{'max':>9}")
    for name, label in _LABELS.items():
        values = [value * 1000 for value in samples[name]]
        print(f"  {label:42}{quantile(values, 0.5):9.1f}{quantile(values, 0.95):9.1f}{max(values):9.1f}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=20)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.02, help="each writer's rest after a round, seconds")
    parser.add_argument("--kind", choices=["classic", "thin"], action="append")
    parser.add_argument("--fs", choices=["ext4", "xfs"], action="append")
    parser.add_argument("--no-check", action="store_true", help="start no server on the copies")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = arguments.json.absolute() if arguments.json else None
    enter_guest(__file__, result.parent if result else None)
    all_samples: dict[str, dict[str, list[float]]] = {}
    for kind in arguments.kind or ("classic", "thin"):
        for fs_type in arguments.fs or ("ext4", "xfs"):
            with (
                volume_group() as group,
                lvm_scene(group, kind, fs_type, size_mib=768) as scene,
                write_load(scene.server.socket, writers=arguments.writers, pause_s=arguments.pause) as load,
                Shell(scene.folder / "errors") as shell,
            ):
                load.warm_up()
                measurement = Measurement(scene, load, shell, check=not arguments.no_check)
                measurement.run(arguments.snapshots)
                whole = load.statistics()
            title = f"{kind} {fs_type}, milliseconds"
            print_table(title, measurement.samples)
            checked = "not checked" if arguments.no_check else f"exact: {measurement.exact} of {arguments.snapshots}"
            print(
                f"  {checked}; {arguments.writers} writers, {whole.writes / whole.elapsed_s:.0f} writes/s", flush=True
            )
            all_samples[f"{kind}-{fs_type}"] = measurement.samples
    if result is not None:
        result.write_text(json.dumps(all_samples))


if __name__ == "__main__":
    main()
