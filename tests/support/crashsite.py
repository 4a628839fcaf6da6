"""A place for crash trials: a job's data, storage and state directory, put back or cut off within milliseconds."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snapmgr.catalog.store import Catalog
from support import faults, tracer
from support.disk import Disk
from support.faults import Faults
from support.server import private_server, server_user
from support.storage import loop_devices, loop_filesystem, mounts_of, processes_of, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.catalog.store import Entry
    from support.server import PrivateServer
    from support.tracer import Kill

Kind = Literal["btrfs", "xfs"]
_SIZES = {"btrfs": 512 << 20, "xfs": 512 << 20, "ext4": 64 << 20}
_STORES = {"btrfs": ".snapmgr", "xfs": ".snapmgr-reflink"}
_WRITE_S = 3.0
_SHOWN = 6
_STORE_MARK = "snapmgr-reflink-store.json"


_PROGRAM = "support.eager"
_INDEX = "index"


# In a mount table of its own, hence only for commands that mount nothing.
_OWN_ETC = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'mkdir -p "$0/upper" "$0/work" && '
    'mount -t overlay own-etc -o "lowerdir=/etc,upperdir=$0/upper,workdir=$0/work" /etc && exec "$@"',
)


@dataclass
class Look:
    """What is there at a moment."""

    ready: list[str] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)
    """Snapshots that are not READY, and their states."""
    digest: str = ""
    """Over the state directory and the names in the storage."""


class Site:
    """One file system to be backed up, the state directory on it or on an ext4 beside it, and a configuration.

    Beside and inside snapmgr's folder lie foreign things: a file, a folder, on btrfs a subvolume; see `strangers`.
    """

    def __init__(self, kind: Kind, disks: Sequence[Disk], folder: Path, *, state_apart: bool) -> None:
        self.kind: Kind = kind
        self.disks = tuple(disks)
        self.top = disks[0].point
        self.data = self.top / "data"
        self.redo = self.top / "redo"
        """Where the redo log of a server on XFS is: a volume of its own, for file by file."""
        self.store = self.top / _STORES[kind]
        self.folder = folder
        self.state = disks[-1].point / "state" if state_apart else self.top / "state"
        self.scratch = folder / "scratch"
        self.work = folder / "work"
        self.config_file = folder / "snapmgr.toml"
        self.boot_file = folder / "boot-id"
        self.server: PrivateServer | None = None
        self.contents: dict[str, str] = {}
        """What each snapshot must hold, by its id; see `tree_digest`."""
        self.etc = self.top / "etc"
        self.own_etc = False
        """Whether commands see an /etc of their own: what they change of it goes to the disk."""
        self._rebooted = False
        self._loops = loop_devices()
        self._foreign = ""
        self._old_index = b""

    # ---- configuration and commands

    def configure(self, job: str) -> None:
        """Write the configuration: the lines of the job "demo", `{data}` filled in."""
        body = job.replace("{data}", str(self.data))
        self.config_file.write_text(f'state_dir = "{self.state}"\nscratch_dir = "{self.scratch}"\n{body}')

    @property
    def _environment(self) -> dict[str, str]:
        """What every command gets: compiled files may be written, and another boot's id after a power cut."""
        found = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(Path(__file__).parents[1])}
        return found | (Faults(boot_id=self.boot_file).environment() if self._rebooted else {})

    def run(
        self, *arguments: str, kill: Kill | None = None, log: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: under the tracer if it is to be killed or logged; "{top}" is filled in."""
        arguments = tuple(word.replace("{top}", str(self.top)) for word in arguments)
        prefix = (*_OWN_ETC, str(self.etc)) if self.own_etc else ()
        if kill is None and log is None:
            return faults.run(
                self.config_file, *arguments, environment=self._environment, prefix=prefix, module=_PROGRAM
            )
        return tracer.run(
            self.config_file,
            *arguments,
            kill=kill,
            log=log,
            environment=self._environment,
            prefix=prefix,
            module=_PROGRAM,
        )

    def must(self, *arguments: str) -> None:
        """Run a command that must succeed."""
        done = self.run(*arguments)
        if done.returncode != 0:
            raise AssertionError(f"snapmgr {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")

    def backup(self) -> None:
        """Change the data, take a snapshot of them and remember what it must hold."""
        if self.server is not None:
            self.must("backup", "demo")
            return
        before = set(self.look().ready)
        (self.data / "generation").write_text(f"{len(self.contents)}\n")
        digest = tree_digest(self.data)
        self.must("backup", "demo")
        for new in set(self.look().ready) - before:
            self.contents[new] = digest

    # ---- strangers

    def strangers(self) -> None:
        """Put foreign things beside and into snapmgr's folder, which must be there."""
        for place in (self.store, self.store.parent):
            (place / "foreign folder").mkdir()
            (place / "foreign folder" / "file").write_text("not yours")
            (place / "foreign file").write_text("not yours")
            if self.kind == "btrfs":
                subvolume = place / "foreign-subvolume"
                subprocess.run(["btrfs", "-q", "subvolume", "create", str(subvolume)], check=True)
                (subvolume / "file").write_text("not yours")

    def _foreign_paths(self) -> list[Path]:
        return [path for place in (self.store, self.store.parent) for path in sorted(place.glob("foreign*"))]

    def _foreign_digest(self) -> str:
        return "\n".join(f"{path} {tree_digest(path, identity=True)}" for path in self._foreign_paths())

    # ---- putting back, cutting off

    def save(self, name: str) -> None:
        """Keep all file systems as they are now, synced, the server shut down, as `name`."""
        if self.server is not None:
            self.server.stop()
        for disk in self.disks:
            disk.unmount()
            disk.copy(name)
        self._mount(name)

    def restore(self, name: str) -> None:
        """Make all as it was at `save(name)`; the server runs."""
        self._exchange(name)
        self._foreign = self._foreign_digest()
        self._rebooted = False

    def cut_power(self) -> None:
        """Go on with what had reached the devices, in another boot; /run, and so the scratch directory, is empty."""
        for disk in reversed(self.disks):
            disk.copy("cut")
        self.boot_file.write_text(f"{uuid.uuid4()}\n")
        self._exchange("cut")
        self._rebooted = True

    def _exchange(self, name: str) -> None:
        if self.server is not None:
            self.server.kill()
        for disk in self.disks:
            disk.unmount()
        self._mount(name)
        for folder in (self.scratch, self.work):
            shutil.rmtree(folder, ignore_errors=True)
        self.work.mkdir()

    def _mount(self, name: str) -> None:
        for disk in self.disks:
            disk.mount(name)
        if self.server is not None:
            self.server.start()

    def hurt_index(self, how: int) -> None:
        """Do to the index of the manifests what must cost time only; `how` is any number."""
        path = self.state / _INDEX
        if path.is_dir():
            path.rmdir()
        content = path.read_bytes() if path.exists() else b""
        old, self._old_index = self._old_index, content
        match how % 6:
            case 1:
                path.unlink(missing_ok=True)
            case 2 if content:
                os.truncate(path, len(content) // 2)
            case 3 if content:
                middle = len(content) // 2
                path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
            case 4 if self.state.exists():
                path.write_bytes(old)  # of an earlier trial, or before the command
            case 5 if self.state.exists():
                path.unlink(missing_ok=True)
                path.mkdir()

    # ---- looking

    def entries(self) -> list[Entry]:
        """Return what the catalog holds; nothing may be damaged."""
        entries, damaged = Catalog(self.state).entries()
        assert damaged == [], damaged
        return entries

    def look(self) -> Look:
        """Return what is there now."""
        entries = self.entries()
        found = Look(
            ready=[entry.manifest.id for entry in entries if entry.manifest.state == "ready"],
            other={entry.manifest.id: entry.manifest.state for entry in entries if entry.manifest.state != "ready"},
        )
        listed = sorted(f"{path} {path.lstat().st_ino}" for path in self.store.iterdir()) if self.store.exists() else []
        # A look may write the index.
        kept = sorted(path for path in self.state.iterdir() if path.name != _INDEX) if self.state.exists() else []
        found.digest = "\n".join([*(f"{path} {tree_digest(path, identity=True)}" for path in kept), *listed])
        return found

    def trusted(self) -> set[str]:
        """Return the snapshots that must be READY in the end: that are now, or would be if the catalog were there."""
        look = self.look()
        stored = {one for one in self.contents if (self.store / one).exists()}
        return set(look.ready) | stored - set(look.other)

    def complaints(self) -> list[str]:
        """Return all that must not be in a place where everything was cleared up."""
        found: list[str] = []
        look = self.look()
        found += [f"{one} is {state}" for one, state in look.other.items() if state != "broken"]
        leases, damaged = Catalog(self.state).leases()
        found += [f"a lease is left: {lease.id} ({lease.why}) at {lease.point}" for lease in leases]
        found += [f"a damaged lease: {one.problem}" for one in damaged]
        found += [f"unfinished file {path}" for path in self._unfinished()]
        found += [f"frozen record {path}" for path in self.state.glob("frozen/*")]
        found += self._storage_complaints(look.ready)
        found += [f"{one} holds something else than what was there" for one in look.ready if not self._is_true(one)]
        found += self._restored_complaints()
        if self.scratch.exists():
            found += [f"left in the scratch directory: {path.name}" for path in self.scratch.iterdir()]
        for disk in self.disks:
            found += [f"mounted: {point}" for point in mounts_of(disk.system.device) if point != str(disk.point)]
        found += [f"process {pid}" for pid in {*processes_of(self.config_file), *processes_of(self.scratch)}]
        ours = {name: image for name, image in loop_devices().items() if str(self.disks[0].point.parent) in image}
        found += [f"loop device {name} of {image}" for name, image in ours.items() if self._loops.get(name) != image]
        if self._foreign != self._foreign_digest():
            found.append(f"something foreign was touched:\n{self._foreign}\n{self._foreign_digest()}")
        return found + self._server_complaints()

    def is_stopped(self) -> bool:
        """Whether the server is frozen."""
        if self.server is None:
            return False
        status = Path(f"/proc/{self.server.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "Tt"

    def _server_complaints(self) -> list[str]:
        """Return whether the server stands still, or is locked by somebody."""
        if self.server is None:
            return []
        if self.is_stopped():
            return ["the server is stopped"]
        start = time.monotonic()
        with self.server.connect(read_timeout=10) as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO probe.t VALUES (1)")
            took_s = time.monotonic() - start
            cursor.execute("SELECT id, info FROM information_schema.processlist WHERE user = 'root'")
            others = [row for row in cursor.fetchall() if row[0] != connection.thread_id()]  # type: ignore[no-untyped-call]
        found = [f"a connection is left at the server: {row}" for row in others]
        return [*found, f"a write took {took_s:.1f} s"] if took_s > _WRITE_S else found

    def _unfinished(self) -> list[Path]:
        """Return temporary files, and folders of snapshots that have no manifest."""
        files = [path for path in self.state.rglob("*") if path.name.startswith(".")]
        return files + [path for path in self.state.glob("snapshots/*") if not (path / "manifest.json").exists()]

    def _storage_complaints(self, ready: list[str]) -> list[str]:
        names = {path.name for path in self.store.iterdir()} if self.store.exists() else set()
        names = {name for name in names if not name.startswith("foreign")}
        wanted = {
            member.ref.name
            for entry in self.entries()
            if entry.manifest.id in ready
            for member in entry.manifest.members
        }
        if self.kind == "btrfs":
            wanted |= {f"{one}.json" for one in ready}
        elif not all(name.startswith(f"{_STORE_MARK}.") for name in names):
            wanted.add(_STORE_MARK)
        else:
            names.clear()  # killed while it made its first mark, it is no store yet; the next backup begins anew
        found = [f"in the storage, though nothing knows it: {name}" for name in sorted(names - wanted)]
        found += [f"missing in the storage: {name}" for name in sorted(wanted - names)]
        if self.kind == "btrfs":
            found += [f"{one} is writable" for one in ready if one in names and not _is_read_only(self.store / one)]
        return found

    def _restored_complaints(self) -> list[str]:
        """Whether all that a restore left is a whole copy, or an empty folder for the next one."""
        known = {self.data, self.redo, self.store, self.state, self.etc, *self._foreign_paths()}
        found = [f"left in /etc: {path}" for path in (self.etc / "upper").rglob("*") if path.is_file()]
        for path in set(self.top.iterdir()) - known:
            if not path.name.startswith("restored"):
                found.append(f"beside the data: {path.name}")
            elif any(path.iterdir()) and self.server is None:
                # The folder's own times come last of all: a crash right before that leaves those of the crash.
                differing = sorted({*_facts(path)[1:]} ^ {*_facts(self.data)[1:]})[:_SHOWN]
                found += [f"{path.name} is not what was restored: {line}" for line in differing]
        return found

    def _is_true(self, one: str) -> bool:
        """Whether a READY snapshot of a directory holds what was there when it was taken."""
        path = self.store / one if self.kind == "btrfs" else self.store / one / "data"
        if self.server is not None:
            return True  # what `verify` is for
        # A snapshot that a trial took is of the data as they are.
        return not path.exists() or tree_digest(path) == (self.contents.get(one) or tree_digest(self.data))


def _is_read_only(subvolume: Path) -> bool:
    argv = ["btrfs", "property", "get", "-ts", str(subvolume), "ro"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() == "ro=true"


def tree_digest(path: Path, *, identity: bool = False) -> str:
    """Return a digest over all below `path`, itself included: names, kinds, modes, owners, content, xattrs, mtimes.

    With `identity` also inode numbers and ctimes: equal only if nothing was touched.
    """
    return hashlib.blake2b("\n".join(_facts(path, identity=identity)).encode(), digest_size=16).hexdigest()


def _facts(path: Path, *, identity: bool = False) -> list[str]:
    """Return a line for each thing below `path`."""
    lines = []
    for one in sorted([path, *path.rglob("*")]):
        status = one.lstat()
        facts: list[object] = [oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns]
        if identity:
            facts += [status.st_ino, status.st_ctime_ns]
        facts += [(name, os.getxattr(one, name, follow_symlinks=False)) for name in _xattrs(one)]
        if stat.S_ISLNK(status.st_mode):
            facts.append(os.readlink(one))
        elif stat.S_ISREG(status.st_mode):
            facts += [status.st_size, hashlib.blake2b(one.read_bytes(), digest_size=8).hexdigest()]
        lines.append(f"{os.fsencode(one.relative_to(path))!r} {facts}")
    return lines


def _xattrs(path: Path) -> list[str]:
    return sorted(os.listxattr(path, follow_symlinks=False))


@contextmanager
def crash_site(kind: Kind, *, state_apart: bool, server: bool = False) -> Iterator[Site]:
    """Yield a site without configuration: the folder `data` is there, on btrfs as a subvolume.

    Args:
        kind: the file system of the data.
        state_apart: whether the state directory lies on an ext4 of its own.
        server: whether a server runs on `data`.
    """
    with ExitStack() as stack:
        base = stack.enter_context(loop_filesystem("xfs", 4 << 30, base=Path("/dev/shm")))
        kinds = (kind, "ext4") if state_apart else (kind,)
        disks = [Disk(stack.enter_context(loop_filesystem(one, _SIZES[one], base=base.point))) for one in kinds]
        folder = stack.enter_context(work_folder())
        site = Site(kind, disks, folder, state_apart=state_apart)
        # Before the folder goes: a trial that failed may have left a mount in it.
        for disk in disks:
            stack.callback(disk.unmount)
        site.work.mkdir()
        if kind == "btrfs":
            subprocess.run(["btrfs", "-q", "subvolume", "create", str(site.data)], check=True)
        else:
            site.data.mkdir()
        if server:
            options: tuple[str, ...] = ()
            if kind == "xfs":
                site.redo.mkdir()
                os.chown(site.redo, server_user().pw_uid, server_user().pw_gid)
                options = (f"--innodb-log-group-home-dir={site.redo}",)
            site.server = stack.enter_context(private_server(site.data, options, install_options=options))
            site.server.query("CREATE DATABASE probe")
            site.server.query("CREATE TABLE probe.t (v INT) ENGINE=InnoDB")
        yield site
