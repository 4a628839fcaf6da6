"""Incremental for ever against full backups: time and space of the same points in time, and whether each restores.

A MariaDB is changed between points, and at each one two jobs back it up, one incremental, one full, each to storage of
its own. Space is what the object store holds after compaction and garbage collection (JuiceFS), or what the files
occupy by FIEMAP (XFS). Then every point of both is restored, and a server on it must have the tables of that time.

    ./run measure incremental
    ./run measure incremental --storage juicefs --points 10 --data 512M --change-every 20
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from snapmgr.contract.units import format_size, parse_size
from support import faults
from support.extents import occupied_bytes
from support.juicefs import juicefs_volume
from support.objectstore import ACCESS_KEY, SECRET_KEY, Pace, object_store
from support.redobackup import change_pages, checksums, fill_tables, table_checksums
from support.requirements import lacking
from support.server import private_server
from support.storage import keep_mounts_private, loop_filesystem, sweep_dead, work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.server import PrivateServer

_TABLES = 8
_LIMIT_S = 1800.0
_NEEDS = {"juicefs": ("root", "juicefs", "redis"), "xfs": ("root", "loop", "xfs")}


@dataclass(kw_only=True)
class Site:
    """One job on storage of its own."""

    mode: str
    config: Path
    occupied: Callable[[], int]
    """Bytes that its backups occupy now, all that can be given back given back."""
    seconds: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    space_bytes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def back_up(self) -> None:
        """Make one backup. Raises RuntimeError with what snapmgr said."""
        started = time.monotonic()
        done = faults.run(self.config, "backup", "lab", "--json", timeout_s=_LIMIT_S)
        self.seconds.append(round(time.monotonic() - started, 2))
        if done.returncode:
            raise RuntimeError(f"backup ({self.mode}) ended with {done.returncode}: {done.stderr[-2000:]}")
        self.ids.append(json.loads(done.stdout)["jobs"][0]["snapshot"]["id"])
        shown = faults.run(self.config, "show", self.ids[-1], "--json")
        self.kinds.append(json.loads(shown.stdout)["snapshot"]["physical"]["kind"])

    def check(self, number: int, expected: dict[str, int]) -> None:
        """Restore one point and compare its tables."""
        with work_folder(Path("/var/tmp")) as folder:
            done = faults.run(self.config, "restore", self.ids[number], f"{folder}/data", timeout_s=_LIMIT_S)
            if done.returncode:
                self.wrong.append(f"point {number + 1} does not restore: {done.stderr[-1000:]}")
            elif table_checksums(folder / "data") != expected:
                self.wrong.append(f"point {number + 1} has other tables than the server had")


def _configure(folder: Path, server: PrivateServer, staging: Path, backend: str, mode: str, more: str = "") -> Path:
    staging.mkdir()
    config = folder / f"{mode}.toml"
    config.write_text(
        f'state_dir = "{folder}/state-{mode}"\nscratch_dir = "{folder}/scratch"\n{more}\n[job.lab]\n'
        f'source = "physical"\nsocket = "{server.socket}"\nuser = "root"\nstaging = "{staging}"\n'
        f'mode = "{mode}"\nbackend = "{backend}"\n'
    )
    return config


@contextmanager
def _juicefs(folder: Path, server: PrivateServer, mode: str, _size: int, pace: Pace) -> Iterator[Site]:
    with ExitStack() as stack:
        store = stack.enter_context(object_store(folder / f"objects-{mode}"))
        made = juicefs_volume(
            "redis", storage="s3", base=folder, bucket=store.bucket(), access_key=ACCESS_KEY, secret_key=SECRET_KEY
        )
        volume = stack.enter_context(made)
        more = f'[backend.juicefs]\nmeta_url = "{volume.meta_url}"\n'
        config = _configure(folder, server, volume.point / "staging", "juicefs", mode, more)

        def occupied() -> int:
            store.pace(Pace())
            volume.juicefs("gc", "--compact", "--delete", volume.meta_url, timeout_s=_LIMIT_S)
            found = store.statistics(count=True).object_bytes
            store.pace(pace)
            assert found is not None
            return found

        store.pace(pace)
        yield Site(mode=mode, config=config, occupied=occupied)


@contextmanager
def _xfs(folder: Path, server: PrivateServer, mode: str, size: int, _pace: Pace) -> Iterator[Site]:
    with loop_filesystem("xfs", max(size, 512 << 20), base=folder) as system:
        config = _configure(folder, server, system.point / "staging", "reflink", mode)

        def occupied() -> int:
            return occupied_bytes(path for path in system.point.rglob("*") if path.is_file())

        yield Site(mode=mode, config=config, occupied=occupied)


_SITES = {"juicefs": _juicefs, "xfs": _xfs}


def _run(storage: str, arguments: argparse.Namespace) -> dict[str, object]:
    data_bytes = parse_size(arguments.data)
    pace = Pace(
        get_latency_s=arguments.latency / 1000,
        put_latency_s=arguments.latency / 600,
        total_bytes_s=round(arguments.gbit * 1e9 / 8),
    )
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder(Path("/var/tmp")))
        (folder / "scratch").mkdir(mode=0o711)
        options = [f"--innodb-buffer-pool-size={max(data_bytes // 2, 64 << 20)}", "--innodb-log-file-size=96M"]
        # A backup's next increment begins at the server's last checkpoint: what is flushed late is fetched twice.
        options += ["--innodb-max-dirty-pages-pct=0", "--innodb-autoextend-increment=4"]
        server = stack.enter_context(private_server(folder / "datadir", options))
        rows = fill_tables(server, data_bytes)
        server.restart()
        size = data_bytes * 2 * (arguments.points + 3)
        sites = [
            stack.enter_context(_SITES[storage](folder, server, mode, size, pace)) for mode in ("incremental", "full")
        ]
        expected = []
        for number in range(arguments.points):
            with server.connect() as connection, connection.cursor() as cursor:
                for table in range(_TABLES):
                    change_pages(cursor, rows, arguments.change_every, number * _TABLES + table)
            expected.append(checksums(server))
            for site in sites if number % 2 else reversed(sites):
                site.back_up()
                site.space_bytes.append(site.occupied())
            told = ", ".join(f"{site.mode} {site.seconds[-1]:.1f} s" for site in sites)
            print(f"{storage}: point {number + 1} of {arguments.points}: {told}", file=sys.stderr)
        server.stop()
        for site in sites:
            for number, tables in enumerate(expected):
                site.check(number, tables)
                print(f"{storage}: point {number + 1} ({site.mode}) checked", file=sys.stderr)
        used = sum(path.stat().st_size for path in (folder / "datadir" / "lab").iterdir())
        return {
            "storage": storage,
            "tables_bytes": used,
            "sites": {site.mode: {key: getattr(site, key) for key in _KEPT} for site in sites},
        }


_KEPT = ("seconds", "kinds", "space_bytes", "wrong")


def _table(results: list[dict[str, object]]) -> str:
    lines = [
        "| Storage | Backups | First, s | Later, s | Space of the first | of all | Restored and equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        sites = result["sites"]
        assert isinstance(sites, dict)
        for mode, site in sites.items():
            later = site["seconds"][1:] or site["seconds"]
            times = f"{median(later):.1f} ({min(later):.1f}–{max(later):.1f})"
            first, last = (format_size(site["space_bytes"][index]) for index in (0, -1))
            whole = len(site["seconds"])
            right = f"{whole - len(site['wrong'])} of {whole}"
            what = f"{mode} ({site['kinds'].count('incremental')} increments)"
            row = (result["storage"], what, f"{site['seconds'][0]:.1f}", times, first, last, right)
            lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=sorted(_SITES), action="append", help="may be repeated (default: both)")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--data", default="512M", help="size of the tables (default: %(default)s)")
    parser.add_argument("--change-every", type=int, default=20, help="one page in so many changes between two points")
    parser.add_argument("--latency", type=float, default=1.0, help="of a GET of the object store, ms (default: 1)")
    parser.add_argument("--gbit", type=float, default=10.0, help="its bandwidth, Gbit/s (default: 10; 0: no limit)")
    parser.add_argument("--json", type=Path, help="write all samples there")
    arguments = parser.parse_args()
    storages = arguments.storage or sorted(_SITES)
    if absent := lacking(["mariadbd", "mariadb-backup", *(name for storage in storages for name in _NEEDS[storage])]):
        print("; ".join(absent), file=sys.stderr)
        sys.exit(7)
    if shutil.disk_usage("/var/tmp").free < parse_size(arguments.data) * 3 * (arguments.points + 4):
        sys.exit("there is too little room in /var/tmp")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sweep_dead()
    keep_mounts_private()
    results = [_run(storage, arguments) for storage in storages]
    print(_table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    wrong = [text for result in results for site in result["sites"].values() for text in site["wrong"]]  # type: ignore[attr-defined]
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
