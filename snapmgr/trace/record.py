"""Records what a mounted JuiceFS volume does, with little effort and within bounds.

The client keeps 10,240 lines for each reader and drops what comes beyond without a mark. So the counters of the mount
are read at the start and at the end, into the file's first and last line: whoever reads it finds what is missing. Each
reading of the counters shows in the log, as `open` of their file by our thread: there their span begins and ends.
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
from typing import TYPE_CHECKING, Any, Literal

from snapmgr import __version__
from snapmgr.contract.errors import ConfigError, MissingRequirementError, SnapmgrError
from snapmgr.system.command import start_for_user, wait_for
from snapmgr.trace.accesslog import HEADER, TRAILER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from snapmgr.system.command import Process
    from snapmgr.trace.mounted import Mounted

StoppedBy = Literal["command", "signal", "time", "size", "mount"]
FORMAT = 1
_READ_BYTES = 1 << 17
_IDLE = b"#\n"
_LEVEL = 1
_GZIP = 31
_FLUSH_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_END_WITHIN_S = 10.0
_JOIN_WITHIN_S = 5.0
_MARKS = 2
_NICE = -10
_GOES = "juicefs_go_"


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
    """Record the mount's operations into a new gzip file until `command` ends, or `stopped`, or a bound is reached.

    Args:
        mount: what to record.
        path: the file, which must not be there yet and not lie on the mount.
        limit_bytes: most of compressed data; a little more is written until the end is found.
        duration_s: how long at most; None for as long as it takes.
        command: is run with our terminal while the recording lasts; a bound ends the recording, never the command.
        stopped: returns the number of the signal that asked us to end, else 0. The command is sent it and waited for.

    Raises ConfigError if the file is there or on the mount, MissingRequirementError without the right to read the log
    or a program for the command, SnapmgrError if the file cannot be written or the mount is gone.
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
            process = _started(command, path)
            why = _watch(pump, process, stopped, start_s + duration_s if duration_s is not None else None)
            pump.finish_soon()
            end: dict[str, Any] = {"stopped_by": why, "wall_s": time.monotonic() - start_s}
            # Without them: the mount is gone.
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
            raise SnapmgrError(f"cannot write {path}: {pump.error.strerror}", hint="what is in it can be shown")
        return Recorded(
            path=path, size_bytes=pump.written_bytes, wall_s=end["wall_s"], stopped_by=why, command_exit=exit_code
        )


def _started(command: Sequence[str], path: Path) -> Process | None:
    try:
        return start_for_user(command) if command else None
    except SnapmgrError:
        # Nothing was recorded, and the next try would meet the file.
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
        # Not its arguments: there may be a password among them.
        "command": os.path.basename(command[0]) if command else None,
        "thread": threading.get_native_id(),
        "counters": _kept(counters),
    }


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
                f"{path} lies on the mount that is to be recorded: it would record itself",
                hint="give a file elsewhere by -o",
            )
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already", hint="name a new file by -o, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None


def _device(path: Path) -> int:
    return path.stat().st_dev


class _Pump(threading.Thread):
    """Copies the log into the file, compressed, from the moment it is started."""

    def __init__(self, log: int, out: int, *, limit_bytes: int, mark: bytes | None) -> None:
        super().__init__(name="trace", daemon=True)
        self.error: OSError | None = None
        """Why the file cannot be written."""
        self.gone = False
        """Whether the mount does not answer any more."""
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
        """Write a line of our own; the last one ends the file. Before the start, and after the end."""
        self._write(kind + json.dumps(document).encode() + b"\n")
        last = zlib.Z_FINISH if kind == TRAILER else zlib.Z_SYNC_FLUSH
        self._put(self._packer.flush(last))

    def finish_soon(self) -> None:
        """Go on only until the reading of the counters that comes now shows in the log."""
        self._deadline_s = time.monotonic() + _END_WITHIN_S

    def end(self) -> None:
        """Wait for the end."""
        if self._deadline_s is None:
            # An exception: what was read so far is kept.
            self._deadline_s = 0.0
        # A client that hangs does not come back: its log stays as it is.
        self.join(_END_WITHIN_S + _JOIN_WITHIN_S)

    def run(self) -> None:
        """Copy until told to finish."""
        with suppress(OSError):
            # Of this thread only: who reads slowly loses lines.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        after_end = False
        while not (self.error or self.gone or after_end):
            # One more reading: an operation is counted a little before its line is written.
            after_end = self._deadline_s is not None and (self._seen >= _MARKS or self._mark is None)
            self.complete = after_end
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                return
            self._copy()

    def _copy(self) -> None:
        try:
            # Comes back after a second at the latest.
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
        if data == _IDLE:
            return
        # Whole lines: the last one may be cut, where the file ends or our own line comes.
        data = self._rest + data
        whole = data.rfind(b"\n") + 1
        self._rest = data[whole:]
        try:
            self._write(data[:whole])
            if time.monotonic() > self._flushed_s + _FLUSH_EVERY_S:
                self._flushed_s = time.monotonic()
                # So that a recorder that is killed leaves all but the last second.
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
    """Wait until the recording is to end, and return why. A signal goes on to the command, which ends in its way."""
    told = 0
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
        elif number and not told:
            told = number
            _pass_on(process, number)


def _pass_on(process: Process, number: int) -> None:
    # A terminal's Ctrl-C has reached the command already.
    if number != signal.SIGINT or not os.isatty(0):
        process.send_signal(number)


def _await(process: Process, stopped: Callable[[], int]) -> int:
    told = 0
    while not wait_for(process, _LOOK_EVERY_S):
        if (number := stopped()) and not told:
            told = number
            _pass_on(process, number)
    return _exit_code(process)


def _exit_code(process: Process) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
