"""A running server on each layout, and how a server is started on a copy of it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.attach import copies, data_path
from support import binlogs
from support.kinds import KINDS
from support.layouts import owned, subvolume
from support.scene import Scene
from support.server import private_server
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Lease, Manifest
    from support.kinds import Kind
    from support.matrix.cells import Cell
    from support.storage import LoopFileSystem

_GIB = 1 << 30
# So that a load of some seconds fills several.
_LOG_BYTES = 4 << 20
_STORES = (".snapmgr", ".snapmgr-reflink")
LOG_BASE = "binlog"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A server whose parts lie as a layout says."""

    scene: Scene
    kind: Kind
    logs: Path
    """Folder of the binary logs."""
    redo: Path | None
    """Folder of the redo log, where it is not in the datadir."""
    subvolumes: tuple[Path, ...]
    """The btrfs subvolumes that a snapshot of it has as members."""
    points: tuple[Path, ...]
    """Where its file systems are mounted."""

    def configure(self, level: str) -> None:
        """Write the configuration of a job of this level."""
        if level == "stopped":
            self.scene.configure(
                text=f'[job.demo]\nsource = "mysql"\nquiesce = "stopped"\ndatadir = "{self.scene.server.datadir}"'
            )
        else:
            self.scene.configure(f'quiesce = "{level}"')

    def stored(self) -> list[str]:
        """Return the names of all that is stored beside the server's files."""
        stores = [point / name for point in self.points for name in _STORES]
        return sorted(path.name for store in stores if store.exists() for path in store.iterdir() if path.is_dir())

    def log_files(self) -> list[Path]:
        """Return the server's binary logs, oldest first."""
        return log_files(self.logs)

    def end_of_logs(self) -> tuple[str, int]:
        """Return name and size of the newest binary log."""
        last = self.log_files()[-1]
        return last.name, last.stat().st_size

    def copied_logs(self, lease: Lease, manifest: Manifest) -> Path | None:
        """Return where the copy of the binary logs is; None if the snapshot does not hold them."""
        if self.logs == self.scene.server.datadir:
            return data_path(lease)
        return copies(lease, manifest).get(str(self.logs))

    def copy_options(self, lease: Lease, manifest: Manifest) -> tuple[str, ...]:
        """Return the options of a server on the attached copy; makes the copy's list of binary logs name the copies.

        Not durable: it is thrown away.
        """
        options = ["--sync-binlog=0", "--innodb-flush-log-at-trx-commit=0"]
        logs = self.copied_logs(lease, manifest)
        if logs is None:
            options.append("--skip-log-bin")
        else:
            options.append(f"--log-bin={logs / LOG_BASE}")
            index = logs / f"{LOG_BASE}.index"
            # The server writes there by the names that it reads: absolute ones are the live server's.
            index.write_text("".join(f"{logs / Path(line).name}\n" for line in index.read_text().splitlines()))
        if self.redo is not None:
            options.append(f"--innodb-log-group-home-dir={copies(lease, manifest)[str(self.redo)]}")
        return tuple(options)


def log_files(folder: Path) -> list[Path]:
    """Return the binary logs in a folder, oldest first."""
    return binlogs.logs(folder / LOG_BASE)


@contextmanager
def running_site(cell: Cell) -> Iterator[Site]:
    """Run the server of `cell`, laid out as it says, while the context lasts."""
    with ExitStack() as stack:

        def mounted(fs_type: str, size_bytes: int = 2 * _GIB) -> Path:
            systems.append(stack.enter_context(loop_filesystem(fs_type, size_bytes)))
            return systems[-1].point

        systems: list[LoopFileSystem] = []
        on_xfs = cell.layout in ("reflink", "two-volumes")
        home = mounted("xfs" if on_xfs else "btrfs")
        volume = home if on_xfs else subvolume(home / "mysql")
        datadir = volume / "data"
        logs, redo = datadir, None
        if cell.layout == "binlog-member":
            logs = subvolume(home / "logs")
        elif cell.layout == "binlog-absent":
            logs = owned(mounted("ext4", _GIB) / "logs")
        elif cell.layout == "two-volumes":
            redo = owned(mounted("xfs", _GIB) / "redo")
        folder = stack.enter_context(work_folder())
        moved = (f"--innodb-log-group-home-dir={redo}",) if redo is not None else ()
        base = LOG_BASE if logs == datadir else logs / LOG_BASE
        options = (f"--log-bin={base}", f"--max-binlog-size={_LOG_BYTES}", *moved)
        server = stack.enter_context(private_server(datadir, options, install_options=moved, kind=cell.server))
        yield Site(
            scene=Scene(systems[0], folder, server),
            kind=KINDS[cell.server],
            logs=logs,
            redo=redo,
            subvolumes=() if on_xfs else (volume, logs) if cell.layout == "binlog-member" else (volume,),
            points=tuple(system.point for system in systems),
        )
