"""Records the operations of a mounted JuiceFS volume, within a size and time limit.

The client buffers 10,240 lines for each reader and silently drops further ones. Therefore the mount's counters are
written to the first and the last line of the file, so that a reader can find missing operations. Each reading of the
counters appears in the log as an `open` of their file by our thread, which marks the span that they cover.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapmgr import __version__
from snapmgr.contract.errors import ConfigError, MissingRequirementError, SnapmgrError
from snapmgr.system.command import start_for_user, wait_for
from snapmgr.trace.accesslog import HEADER, TRAILER
from snapmgr.trace.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.system.command import Process
    from snapmgr.trace.mounted import Mounted

StoppedBy = Literal["command", "signal", "time", "size", "mount"]
FORMAT = 1
_READ_BYTES = 1 << 17
_LEVEL = 1
_GZIP = 31
_FLUSH_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_END_WITHIN_S = 10.0
_JOIN_WITHIN_S = 5.0
_MARKS = 2
_NICE = -10
_GOES = "juicefs_go_"
_TOOLS = ("mariadb-backup", "mariabackup", "xtrabackup")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """How a recording ended."""

    path: Path
    size_bytes: int
    wall_s: float
    stopped_by: StoppedBy
    command_exit: int | None
    """The command's exit code; 128 and the signal's number if one ended it; None without a command."""


def record(
    mount: Mounted,
    path: Path,
    *,
    limit_bytes: int,
    duration_s: float | None = None,
    command: Sequence[str] = (),
    stopped: Callable[[], int] = lambda: 0,
) -> Recorded:
    """Record the mount's operations to a new gzip file until `command` ends, `stopped` is true, or a limit is reached.

    Args:
        mount: the mount to record.
        path: the file, which must not exist yet nor be on the mount.
        limit_bytes: limit of compressed data; slightly more is written until the end is found.
        duration_s: time limit; None for no limit.
        command: run with our terminal during the recording; a limit ends the recording, never the command.
        stopped: returns the number of the signal that asked us to end, else 0. It is sent to the command too.

    Raises ConfigError if the file exists or is on the mount, MissingRequirementError without the privilege to read the
    log or if the command does not exist, SnapmgrError if the file cannot be written or the mount is gone.
    """
    with ExitStack() as stack:
        log = _open_log(mount)
        stack.callback(os.close, log)
        out = _create(path, mount)
        stack.callback(os.close, out)
        mark = b"pid:%d] open (%d" % (threading.get_native_id(), mount.stats_inode) if mount.stats_inode else None
        pump = _Pump(log, out, limit_bytes=limit_bytes, mark=mark)
        counters, start_s = mount.counters(), time.monotonic()
        pump.write_mark(HEADER, _header(mount, counters, command))
        pump.start()
        process: Process | None = None
        try:
            with Sampler(mount) as sampler:
                process = _started(command, path)
                why = _watch(pump, process, stopped, start_s + duration_s if duration_s is not None else None)
            pump.finish_soon()
            end: dict[str, Any] = {"stopped_by": why, "wall_s": time.monotonic() - start_s}
            end |= {"samples": sampler.samples, "sampler": sampler.native_id}
            # They are missing if the mount is gone.
            with suppress(SnapmgrError):
                end["counters"] = _kept(mount.counters())
        finally:
            pump.end()
        exit_code = _exit_code(process) if process is not None and why == "command" else None
        if pump.error is None:
            pump.write_mark(TRAILER, end | {"command_exit": exit_code, "complete": pump.complete})
        if process is not None and exit_code is None:
            exit_code = _await(process, stopped)
        if pump.error is not None:
            raise SnapmgrError(
                f"cannot write {path}: {pump.error.strerror}",
                hint="make space; trace show reads the part that was written",
            )
        return Recorded(
            path=path, size_bytes=pump.written_bytes, wall_s=end["wall_s"], stopped_by=why, command_exit=exit_code
        )


def _started(command: Sequence[str], path: Path) -> Process | None:
    try:
        return start_for_user(command) if command else None
    except SnapmgrError:
        # Nothing was recorded, and the file would make the next attempt fail.
        path.unlink()
        raise


def _header(mount: Mounted, counters: dict[str, float], command: Sequence[str]) -> dict[str, Any]:
    now = datetime.now().astimezone()
    offset = now.utcoffset()
    facts = asdict(mount)
    del facts["log"], facts["stats"]
    return facts | {
        "format": FORMAT,
        "recorder": f"snapmgr {__version__}",
        "point": str(mount.point),
        "started": now.isoformat(),
        "zone_offset_s": int(offset.total_seconds()) if offset else 0,
        # Not its arguments, which may contain a password.
        "command": os.path.basename(command[0]) if command else None,
        "prepares": _prepares(command),
        "folder": _folder(command, mount.point),
        "thread": threading.get_native_id(),
        "counters": _kept(counters),
    }


def _prepares(command: Sequence[str]) -> bool:
    """Whether a command prepares a backup: with the servers' own tools, or with us."""
    name = os.path.basename(command[0]) if command else ""
    return (name in _TOOLS and "--prepare" in command) or (name == "snapmgr" and "prepare" in command)


def _folder(command: Sequence[str], point: Path) -> str | None:
    """Return the first argument, or value of an option, that is a folder on the mount: such a path is no secret."""
    for word in command[1:]:
        for text in (word, word.partition("=")[2]):
            if text and os.path.isdir(text) and Path(os.path.realpath(text)).is_relative_to(os.path.realpath(point)):
                return os.path.abspath(text)
    return None


def _kept(counters: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in counters.items() if not name.startswith(_GOES)}


def _open_log(mount: Mounted) -> int:
    try:
        return os.open(mount.log, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        raise MissingRequirementError(f"no right to read {mount.log}", hint="run as root") from None
    except OSError as error:
        raise SnapmgrError(f"cannot read {mount.log}: {error.strerror}") from None


def _create(path: Path, mount: Mounted) -> int:
    try:
        if _device(path.absolute().parent) == _device(mount.point):
            raise ConfigError(
                f"{path} is on the mount to be recorded, so the recording would record itself",
                hint="give a file elsewhere with -o",
            )
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists already", hint="give a new file with -o, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}") from None


def _device(path: Path) -> int:
    return path.stat().st_dev


class _Pump(threading.Thread):
    """Copies the log to the file, compressed, in a thread."""

    def __init__(self, log: int, out: int, *, limit_bytes: int, mark: bytes | None) -> None:
        super().__init__(name="trace", daemon=True)
        self.error: OSError | None = None
        """Why the file cannot be written."""
        self.gone = False
        """Whether the mount no longer answers."""
        self.complete = False
        """Whether the end of the span was seen in the log."""
        self.written_bytes = 0
        self.full = threading.Event()
        self._log, self._out = log, out
        self._limit_bytes = limit_bytes
        self._mark = mark
        self._seen = 0
        self._tail = b""
        self._rest = b""
        self._deadline_s: float | None = None
        self._packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._flushed_s = time.monotonic()

    def write_mark(self, kind: bytes, document: dict[str, Any]) -> None:
        """Write a line of our own, before the thread starts or after it has ended; the trailer ends the file."""
        self._write(kind + json.dumps(document).encode() + b"\n")
        last = zlib.Z_FINISH if kind == TRAILER else zlib.Z_SYNC_FLUSH
        self._put(self._packer.flush(last))

    def finish_soon(self) -> None:
        """Continue only until the reading of the counters that follows appears in the log."""
        self._deadline_s = time.monotonic() + _END_WITHIN_S

    def end(self) -> None:
        """Wait until the thread has ended."""
        if self._deadline_s is None:
            # After an exception: keep the data read so far.
            self._deadline_s = 0.0
        # A hung client never returns; its log stays incomplete.
        self.join(_END_WITHIN_S + _JOIN_WITHIN_S)

    def run(self) -> None:
        """Copy until `finish_soon` or an error ends it."""
        with suppress(OSError):
            # For this thread only: a slow reader loses lines.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        after_end = False
        while not (self.error or self.gone or after_end):
            # Read once more, as an operation is counted shortly before its line is written.
            after_end = self._deadline_s is not None and (self._seen >= _MARKS or self._mark is None)
            self.complete = after_end
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                return
            self._copy()

    def _copy(self) -> None:
        try:
            # Returns within a second.
            data = os.read(self._log, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self.gone = True
            return
        if self._mark is not None:
            around = self._tail + data
            self._seen += around.count(self._mark)
            self._tail = around[-len(self._mark) + 1 :]
        # Only whole lines: the last one may be incomplete when the file ends or our own line follows.
        data = self._rest + data
        whole = data.rfind(b"\n") + 1
        self._rest = data[whole:]
        try:
            self._write(data[:whole])
            if time.monotonic() > self._flushed_s + _FLUSH_EVERY_S:
                self._flushed_s = time.monotonic()
                # If we are killed, the file has all but the last second.
                self._put(self._packer.flush(zlib.Z_SYNC_FLUSH))
        except OSError as error:
            self.error = error
        if self.written_bytes > self._limit_bytes:
            self.full.set()

    def _write(self, data: bytes) -> None:
        self._put(self._packer.compress(data))

    def _put(self, packed: bytes) -> None:
        self.written_bytes += len(packed)
        while packed:
            packed = packed[os.write(self._out, packed) :]


def _watch(pump: _Pump, process: Process | None, stopped: Callable[[], int], until_s: float | None) -> StoppedBy:
    """Wait until the recording has to end, and return why. A signal is passed on to the command."""
    passed_on = 0
    while True:
        if pump.full.is_set():
            return "size"
        if pump.gone or pump.error:
            return "mount"
        if until_s is not None and time.monotonic() >= until_s:
            return "time"
        number = stopped()
        if process is None:
            if number:
                return "signal"
            time.sleep(_LOOK_EVERY_S)
        elif wait_for(process, _LOOK_EVERY_S):
            return "command"
        elif number and not passed_on:
            passed_on = number
            _pass_on(process, number)


def _pass_on(process: Process, number: int) -> None:
    # Ctrl-C of a terminal has reached the command already.
    if number != signal.SIGINT or not os.isatty(0):
        process.send_signal(number)


def _await(process: Process, stopped: Callable[[], int]) -> int:
    passed_on = 0
    while not wait_for(process, _LOOK_EVERY_S):
        if (number := stopped()) and not passed_on:
            passed_on = number
            _pass_on(process, number)
    return _exit_code(process)


def _exit_code(process: Process) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
