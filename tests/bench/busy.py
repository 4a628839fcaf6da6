"""Backups of a server with many busy clients: how many succeed, with which lock, and how long writers waited.

sysbench works with --connections clients, and one more writer commits row after row; the longest time that a commit of
it took is compared with that of as long a time without a backup, right before.

    ./run measure busy --server mysql-9 --connections 1000 --backups 20
    ./run measure busy --connections 750 --engine aria
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from support.busy import BusyClients, busy_clients, server_options
from support.kinds import KINDS, SYSTEM
from support.load import WriteLoad, write_load
from support.samples import quantile
from support.scene import Scene, btrfs_scene

_KEPT = 4
_QUIET_S = 3.0


class Series:
    """Backups one after another, and what writers felt of them."""

    def __init__(self, scene: Scene, clients: BusyClients, load: WriteLoad) -> None:
        self._scene = scene
        self._clients = clients
        self._load = load
        self.failed = 0
        self.commits: dict[str, list[float]] = {"without a backup": [], "during a backup": []}
        self.transactions: dict[str, list[float]] = {"without a backup": [], "with backups": []}

    def step(self, number: int, *, verify: bool) -> None:
        """Measure some seconds without a backup, then take one; print a line."""
        first, quiet_ns = len(self._clients.seconds()), time.monotonic_ns()
        time.sleep(_QUIET_S)
        self.transactions["without a backup"] += [longest for _, longest in self._clients.seconds()[first:]]
        first, start_ns = len(self._clients.seconds()), time.monotonic_ns()
        done = self._scene.run("backup", "demo", timeout_s=600)
        end_ns = time.monotonic_ns()
        self._clients.wait_for_seconds(2)
        self._load.check_alive()
        self.transactions["with backups"] += [longest for _, longest in self._clients.seconds()[first:]]
        before_s = self._load.statistics(since_ns=quiet_ns, until_ns=start_ns).worst_s
        during_s = self._load.statistics(since_ns=start_ns, until_ns=end_ns).worst_s
        self.commits["without a backup"].append(before_s)
        self.commits["during a backup"].append(during_s)
        line = f"{number:3} exit {done.returncode} after {(end_ns - start_ns) / 1e9:5.1f} s"
        if done.returncode == 0:
            line += self._describe(verify=verify)
        self.failed += done.returncode != 0
        print(f"{line}; the writer's longest commit {before_s:.2f} s before, {during_s:.2f} s during", flush=True)
        if done.returncode != 0:
            print(done.stderr, flush=True)
        if len(self._scene.stored()) > _KEPT:
            oldest = next(entry.manifest.id for entry in self._scene.entries() if entry.manifest.state == "ready")
            self._scene.run("delete", "--yes", "--force", oldest)

    def _describe(self, *, verify: bool) -> str:
        manifest = self._scene.entries()[-1].manifest
        quiesce = manifest.quiesce
        assert quiesce is not None
        line = (
            f", {quiesce.level}, tries {quiesce.attempts}, waited {quiesce.waited_s:.3f} s, held {quiesce.held_s:.3f} s"
            f", stall {quiesce.stall_s:.3f} s, position {'exact' if manifest.position else 'absent'}"
        )
        if verify:
            proof = self._scene.run("verify", manifest.id, timeout_s=600)
            line += f", verify exit {proof.returncode}"
            self.failed += proof.returncode != 0
        return line


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=sorted(KINDS), default=SYSTEM)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--backups", type=int, default=20)
    parser.add_argument("--engine", choices=("aria", "myisam"), help="the writer writes to a table of it, too")
    parser.add_argument("--job", default="", help="further lines of the job, as 'quiesce = \"backup-lock\"'")
    parser.add_argument("--verify-every", type=int, default=5, help="one in so many snapshots is verified")
    parser.add_argument("--seconds", type=float, default=540.0, help="no backup begins after this")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        options = server_options(arguments.connections)
        scene = stack.enter_context(btrfs_scene(*options, size_bytes=6 << 30, kind=arguments.server))
        scene.configure(arguments.job)
        clients = stack.enter_context(busy_clients(scene.server, scene.folder, arguments.connections))
        engines = (arguments.engine,) if arguments.engine else ()
        load = stack.enter_context(write_load(scene.server.socket, writers=1, engines=engines))
        series, began = Series(scene, clients, load), time.monotonic()
        for number in range(1, arguments.backups + 1):
            if time.monotonic() - began > arguments.seconds:
                print(f"out of time after {number - 1} backups")
                break
            series.step(number, verify=number % arguments.verify_every == 1)
        tps = [tps for tps, _ in clients.seconds()]
        print(
            f"{arguments.server}, {arguments.connections} clients, {sum(tps) / len(tps):.0f} transactions/s: "
            f"{series.failed} of {len(series.commits['during a backup'])} failed"
        )
        for title, samples in (
            ("longest commit of the writer", series.commits),
            ("longest transaction of each second", series.transactions),
        ):
            for when, values in samples.items():
                print(f"{title}, {when:18} p50 {quantile(values, 0.5):6.2f} s, max {max(values):6.2f} s")


if __name__ == "__main__":
    main()
