"""How long clients wait for a snapshot by `quiesce = "freeze-process"`: copies by reflink on XFS under load.

Backups and pauses as long as a backup in turn, so that the machine's moods hit both. Prints a table and, with --json
FILE, the raw samples.

    ./run measure freeze --sets 20 --writers 4
    ./run measure freeze --sets 20 --volumes 2     # data and redo log on two file systems
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from support.load import WriteLoad, write_load
from support.samples import quantile
from support.scene import Scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_REST_S = 0.05
_LABELS = {
    "copy": "copy alone, by the helper",
    "frozen": "server frozen, stop to go",
    "hold": "lock held, granted to released",
    "wait": "lock asked for to granted",
    "backup": "whole backup, in process",
    "stall_nothing": "writers' worst wait, no snapshot",
    "stall": "writers' worst wait, backup",
}


@contextmanager
def xfs_scene(volumes: int, size_bytes: int, tables: int) -> Iterator[Scene]:
    """Yield a scene whose server has all on one XFS, or its redo log on a second one, and some empty tables more."""
    with ExitStack() as stack:
        systems = [stack.enter_context(loop_filesystem("xfs", size_bytes)) for _ in range(volumes)]
        folder = stack.enter_context(work_folder())
        moved: tuple[str, ...] = ()
        if volumes > 1:
            redo = systems[1].point / "redo"
            redo.mkdir()
            os.chown(redo, server_user().pw_uid, server_user().pw_gid)
            moved = (f"--innodb-log-group-home-dir={redo}",)
        server = stack.enter_context(private_server(systems[0].point / "data", moved, install_options=moved))
        server.query("CREATE DATABASE bench")
        for number in range(tables):
            server.query(f"CREATE TABLE bench.t{number} (id INT PRIMARY KEY, v VARCHAR(100)) ENGINE=InnoDB")
        scene = Scene(systems[0], folder, server)
        scene.configure('quiesce = "freeze-process"')
        yield scene


def measure(scene: Scene, load: WriteLoad, sets: int) -> dict[str, list[float]]:
    """Return samples in seconds, by name."""
    ctx = scene.context()
    job = ctx.config.job("demo")
    samples: dict[str, list[float]] = {name: [] for name in _LABELS}
    took_s = 0.2

    def ours() -> None:
        nonlocal took_s
        start = time.monotonic_ns()
        manifest = backup(ctx, job)
        end = time.monotonic_ns()
        took_s = (end - start) / 1e9
        quiesce = manifest.quiesce
        assert quiesce is not None
        samples["copy"].append(sum(member.call_s for member in manifest.members))
        samples["frozen"].append(quiesce.frozen_s)
        samples["hold"].append(quiesce.held_s)
        samples["wait"].append(quiesce.waited_s)
        samples["backup"].append(took_s)
        # What began to wait in the backup has come back by then.
        time.sleep(0.1)
        samples["stall"].append(load.statistics(since_ns=start, until_ns=end).worst_s)
        delete(ctx, manifest)

    def nothing() -> None:
        # As long a time as a backup's, so that the worst of as many writes is compared.
        start = time.monotonic_ns()
        time.sleep(took_s)
        end = time.monotonic_ns()
        time.sleep(0.1)
        samples["stall_nothing"].append(load.statistics(since_ns=start, until_ns=end).worst_s)

    for number in range(sets):
        steps = [ours, nothing]
        for step in steps if number % 2 == 0 else reversed(steps):
            step()
            load.check_alive()
            time.sleep(_REST_S)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {sets}", end="", file=sys.stderr)
    return samples


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--volumes", type=int, choices=(1, 2), default=1, help="2: the redo log on a second XFS")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="each writer's rest after a round, seconds")
    parser.add_argument("--tables", type=int, default=100, help="further tables: the copy takes its time by file")
    parser.add_argument("--size-gib", type=float, default=2.0, help="of each file system")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        size_bytes = int(arguments.size_gib * (1 << 30))
        scene = stack.enter_context(xfs_scene(arguments.volumes, size_bytes, arguments.tables))
        load = stack.enter_context(
            write_load(str(scene.server.socket), writers=arguments.writers, pause_s=arguments.pause)
        )
        load.warm_up()
        files = sum(len(names) for _, _, names in os.walk(scene.server.datadir))
        samples = measure(scene, load, arguments.sets)
        whole = load.statistics()
    print(
        f"{arguments.sets} sets of {arguments.volumes} volume{'s' * (arguments.volumes > 1)}, some {files} files, "
        f"{arguments.writers} writers ({whole.writes / whole.elapsed_s:.0f} writes/s)"
    )
    print(f"{'milliseconds':38}{'p50':>9}{'p95':>9}{'max':>9}")
    for name, label in _LABELS.items():
        values = [value * 1000 for value in samples[name]]
        print(f"{label:38}{quantile(values, 0.5):9.1f}{quantile(values, 0.95):9.1f}{max(values):9.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
