"""How long the lock is held, beside the bare snapshot call under the same load, and what the writers feel of both.

Interleaved: backup, bare call, bare call, backup, …, so that the machine's moods hit both. Prints a table and, with
--json FILE, the raw samples.

    ./run measure hold --snapshots 100 --writers 4
    ./run measure hold --snapshots 30 --dirty-gib 1
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from snapmgr.mysql.connect import client
from support.bare import bare_snapshot
from support.load import WriteLoad, write_load
from support.samples import quantile
from support.scene import Scene, btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHUNK = 1 << 20


class Dirtier:
    """A process that overwrites one file with incompressible data, without ever syncing; stopped when told."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size = size_bytes
        self._pid: int | None = None

    def start(self) -> None:
        """Write the whole file once, then go on overwriting it."""
        reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            data = os.urandom(_CHUNK)
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            first = True
            while os.getppid() != 1:
                for offset in range(0, self._size, _CHUNK):
                    os.pwrite(fd, data, offset)
                if first:
                    os.write(writer, b"x")
                    first = False
            os._exit(0)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)

    def stop(self) -> None:
        """End it at once; what it dirtied stays dirty."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None


@contextmanager
def at_statement(wanted: str, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` when the statement `wanted` is about to be sent."""
    execute = client.Connection.execute

    def watched(self: client.Connection, sql: str, args: tuple[object, ...] = ()) -> None:
        if sql.endswith(wanted):
            action()
        execute(self, sql, args)

    client.Connection.execute = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        client.Connection.execute = execute  # type: ignore[method-assign]


def measure(scene: Scene, load: WriteLoad, snapshots: int, dirty_bytes: int, until: str) -> dict[str, list[float]]:
    """Return samples in seconds, by name."""
    ctx = scene.context()
    job = ctx.config.job("demo")
    origin = Path(scene.file_system.point) / "mysql"
    target = origin.parent / "bare"
    dirtier = Dirtier(origin / "dirty", dirty_bytes)
    samples: dict[str, list[float]] = {
        name: [] for name in ("hold", "wait", "call", "bare", "backup", "stall", "stall_bare", "stall_nothing")
    }

    def ours() -> None:
        if dirty_bytes:
            dirtier.start()
        start = time.monotonic_ns()
        with at_statement(until, dirtier.stop):
            manifest = backup(ctx, job)
        end = time.monotonic_ns()
        assert manifest.quiesce is not None
        samples["hold"].append(manifest.quiesce.held_s)
        samples["wait"].append(manifest.quiesce.waited_s)
        samples["call"].append(manifest.members[0].call_s)
        samples["backup"].append((end - start) / 1e9)
        time.sleep(0.1)
        samples["stall"].append(load.statistics(since_ns=start, until_ns=end).worst_s)
        delete(ctx, manifest)

    def bare() -> None:
        start, end = bare_snapshot(origin, target)
        samples["bare"].append((end - start) / 1e9)
        time.sleep(0.1)
        # As long a window as a backup's, so that the worst of as many writes is compared.
        samples["stall_bare"].append(load.statistics(since_ns=start - 100_000_000, until_ns=end).worst_s)

    def nothing() -> None:
        start = time.monotonic_ns()
        time.sleep(0.12)
        end = time.monotonic_ns()
        samples["stall_nothing"].append(load.statistics(since_ns=start, until_ns=end).worst_s)

    try:
        for number in range(snapshots):
            steps = [ours, bare, nothing]
            for step in steps if number % 2 == 0 else reversed(steps):
                step()
                load.check_alive()
                time.sleep(0.05)
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {snapshots}", end="", file=sys.stderr)
    finally:
        dirtier.stop()
    return samples


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=100)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="each writer's rest after a round, seconds")
    parser.add_argument("--dirty-gib", type=float, default=0.0)
    parser.add_argument("--dirty-until", default="BACKUP STAGE START", help="the statement at which the dirtying stops")
    parser.add_argument("--size-gib", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scene = stack.enter_context(btrfs_scene(size_bytes=int(arguments.size_gib * (1 << 30))))
        load = stack.enter_context(
            write_load(str(scene.server.socket), writers=arguments.writers, pause_s=arguments.pause)
        )
        load.warm_up()
        samples = measure(scene, load, arguments.snapshots, int(arguments.dirty_gib * (1 << 30)), arguments.dirty_until)
        whole = load.statistics()
    print(
        f"{arguments.snapshots} snapshots, {arguments.writers} writers ({whole.writes / whole.elapsed_s:.0f} writes/s)"
        f", {arguments.dirty_gib:g} GiB dirtied before each"
    )
    print(f"{'milliseconds':38}{'p50':>9}{'p95':>9}{'max':>9}")
    labels = {
        "bare": "bare snapshot call",
        "call": "the same call in a backup",
        "hold": "lock held, granted to released",
        "wait": "lock asked for to granted",
        "backup": "whole backup, in process",
        "stall_nothing": "writers' worst wait, no snapshot",
        "stall_bare": "writers' worst wait, bare call",
        "stall": "writers' worst wait, backup",
    }
    for name, label in labels.items():
        values = [value * 1000 for value in samples[name]]
        print(f"{label:38}{quantile(values, 0.5):9.1f}{quantile(values, 0.95):9.1f}{max(values):9.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
