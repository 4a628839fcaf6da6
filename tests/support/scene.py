"""A whole scene for snapmgr: a server on a loop file system, a configuration, a catalog, and ways to look at them."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from snapmgr.context import Context
from support import faults
from support.documents import conforms
from support.kinds import SYSTEM
from support.server import private_server
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.store import Entry
    from support.faults import Faults
    from support.server import PrivateServer
    from support.storage import LoopFileSystem


class Scene:
    """A btrfs file system, a server whose datadir is a subvolume of it, and a job "demo"."""

    def __init__(self, file_system: LoopFileSystem, folder: Path, server: PrivateServer | None) -> None:
        self.file_system = file_system
        self.folder = folder
        self._server = server
        self.config_file = folder / "snapmgr.toml"
        self.state = folder / "state"
        self.scratch = folder / "scratch"
        self.lines: list[str] = []

    @property
    def server(self) -> PrivateServer:
        """The server; an error where the scene has none."""
        assert self._server is not None
        return self._server

    def configure(self, job: str = "", *, text: str = "", name: str = "demo") -> None:
        """Write the configuration: one job for the server, with further lines `job`; or the whole of `text`."""
        body = text or f'[job.{name}]\nsource = "mysql"\nsocket = "{self.server.socket}"\nuser = "root"\n{job}\n'
        self.config_file.write_text(f'state_dir = "{self.state}"\nscratch_dir = "{self.scratch}"\n{body}')

    def context(self) -> Context:
        """Return a fresh context, as a new process would have."""
        config = load_config(self.config_file)
        return Context(config=config, catalog=Catalog(config.state_dir), tell=self.lines.append)

    def run(
        self, *arguments: str, faults_: Faults | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end."""
        return faults.run(self.config_file, *arguments, faults=faults_, timeout_s=timeout_s)

    def start(self, *arguments: str, faults_: Faults | None = None) -> subprocess.Popen[str]:
        """Start the command line."""
        return faults.start(self.config_file, *arguments, faults=faults_)

    def json(self, *arguments: str) -> Any:
        """Run a command that must succeed and return its --json, which has the published form."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        conforms(document)
        return document

    def entries(self) -> list[Entry]:
        """Return what the catalog holds; nothing may be damaged."""
        entries, damaged = Catalog(self.state).entries()
        assert damaged == []
        return entries

    def states(self) -> list[str]:
        """Return the states of all snapshots, oldest first."""
        return [entry.manifest.state for entry in self.entries()]

    def stored(self) -> list[str]:
        """Return the names of all subvolumes in snapmgr's folder, as the btrfs program sees them."""
        listing = subprocess.run(
            ["btrfs", "subvolume", "list", "-a", self.file_system.point], capture_output=True, text=True, check=True
        ).stdout
        paths = [line.split(" path ", 1)[1].removeprefix("<FS_TREE>/") for line in listing.splitlines()]
        return sorted(path.split("/", 1)[1] for path in paths if path.startswith(".snapmgr/"))

    def snapshot_paths(self) -> list[Path]:
        """Return where those subvolumes are reachable."""
        return [Path(self.file_system.point, ".snapmgr", name) for name in self.stored()]


@contextmanager
def btrfs_scene(*options: str, size_bytes: int = 1 << 30, server: bool = True, kind: str = SYSTEM) -> Iterator[Scene]:
    """Yield a scene with a running server of `kind` (with further `options`), configured with the job "demo"."""
    with ExitStack() as stack:
        file_system = stack.enter_context(loop_filesystem("btrfs", size_bytes))
        folder = stack.enter_context(work_folder())
        subvolume = Path(file_system.point) / "mysql"
        subprocess.run(["btrfs", "-q", "subvolume", "create", subvolume], check=True)
        running = None
        if server:
            running = stack.enter_context(private_server(subvolume / "data", options, kind=kind))
        scene = Scene(file_system, folder, running)
        if server:
            scene.configure()
        yield scene


@contextmanager
def scattered_scene() -> Iterator[Scene]:
    """Yield a scene whose server has redo log, binary log and the table d.t (1, 2) beside its datadir; backed up once.

    All are folders of the one subvolume: "data", "redo", "log" and "tables".
    """
    with btrfs_scene(server=False) as scene:
        volume = Path(scene.file_system.point) / "mysql"
        for name in ("redo", "log", "tables"):
            (volume / name).mkdir()
            (volume / name).chmod(0o777)
        install = [f"--innodb-log-group-home-dir={volume}/redo"]
        options = [*install, f"--log-bin={volume}/log/binlog"]
        with private_server(volume / "data", options, install_options=install) as server:
            scene._server = server
            scene.configure()
            server.query("CREATE DATABASE d")
            server.query(f"CREATE TABLE d.t (a INT) DATA DIRECTORY='{volume}/tables'")
            server.query("INSERT INTO d.t VALUES (1), (2)")
            assert scene.run("backup", "demo").returncode == 0
            yield scene
