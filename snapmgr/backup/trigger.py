"""Runs the helper process that fires an armed snapshot within a deadline.

A storage call can hang where no signal reaches it, and libbtrfsutil's binding holds Python's global lock meanwhile. So
a separate process makes the call. It is forked *before* the database connection exists, and has no copy of the socket
or of any lock file. The process with the connection only waits, with a timeout. Whatever hangs, dropping the connection
frees the database.

The helper itself removes a snapshot that is complete only after the deadline; if it was killed, the next sweep does.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import msgspec

from snapmgr.contract.backend import Announcing, Readying
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import FireError, Shot
from snapmgr.system.host import ends_by, keep_only, signals_held, this_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from snapmgr.contract.backend import Armed

_DEADLINE = struct.Struct("d")
_LENGTH = struct.Struct("I")
_READY = b"r"
# All storage calls have returned; the outcome, with the snapshots' ids, follows.
_FIRED = b"f"
_ENDED = b"e"
# Time to find the ids; no lock is held then.
_IDENTIFY_S = 120.0


class DeadlineError(StorageError):
    """The storage call did not return in time; it may still be running in the helper."""


class _Outcome(msgspec.Struct):
    shots: tuple[Shot, ...] = ()
    error: str | None = None
    hint: str | None = None


class Trigger:
    """A forked helper that waits to fire `armed`.

    A context manager: its end closes our ends of the pipes, and a helper that got no order to fire exits. A helper that
    hangs in its storage call is abandoned, never killed.

    Args:
        armed: the snapshot to fire; only its `fds` stay open in the helper.
        undo: removes a shot that came too late or that nobody is waiting for any more; runs in the helper.
    """

    def __init__(self, armed: Armed, undo: Callable[[Shot], None]) -> None:
        self._armed = armed
        order_out, self._order = os.pipe()
        self._outcome, outcome_in = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal between the fork and the helper's own handlers would run the parent's cleanup in the helper.
        with signals_held():
            self.pid = os.fork()
            if self.pid == 0:
                _helper(armed, undo, order_out, outcome_in)
        os.close(order_out)
        os.close(outcome_in)
        self.process = this_process(self.pid)
        self._reaped = False
        self._shots: tuple[Shot, ...] | None = None
        # Wait until it has closed its copies of our files, and has set up all that would cost time under the lock.
        if os.read(self._outcome, 1) != _READY:
            raise StorageError("the helper process that takes the snapshot died while it started")

    def fire(self, deadline: float) -> None:
        """Order the helper to fire, and return when the storage has taken all snapshots; `shots` returns them.

        Args:
            deadline: time.monotonic() at which we stop waiting.

        Raises DeadlineError when the call has not returned by then, FireError when it failed, StorageError when the
        helper died.
        """
        self._armed.launched = True
        try:
            os.write(self._order, _DEADLINE.pack(deadline))
        except BrokenPipeError:
            raise StorageError("the helper process that takes the snapshot died before the storage call") from None
        if self._read(1, deadline) == _ENDED:
            self._shots = self._read_outcome(deadline)

    def shots(self) -> tuple[Shot, ...]:
        """Return the snapshots that `fire` took; the helper may have to ask the storage for their ids.

        Raises FireError if it cannot find its snapshots, DeadlineError if it takes too long, StorageError if it died.
        """
        if self._shots is None:
            self._shots = self._read_outcome(time.monotonic() + _IDENTIFY_S)
        return self._shots

    def _read_outcome(self, deadline: float) -> tuple[Shot, ...]:
        # The length comes first, as the end of the pipe is late: the helper's exit takes milliseconds.
        length = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
        outcome = msgspec.msgpack.decode(self._read(length, deadline), type=_Outcome)
        if outcome.error is not None:
            raise FireError(outcome.error, hint=outcome.hint, shots=outcome.shots)
        return outcome.shots

    def _read(self, length: int, deadline: float) -> bytes:
        """Read so many bytes from the helper."""
        data = b""
        while len(data) < length:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._outcome], [], [], left_s)[0]:
                raise self._deadline_error()
            chunk = os.read(self._outcome, length - len(data))
            if not chunk:
                if time.monotonic() > deadline:
                    # After the deadline the helper writes nothing, and it may have passed before we read.
                    raise self._deadline_error()
                raise StorageError("the helper process that takes the snapshot died in its storage call")
            data += chunk
        return data

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"the storage call had not returned at the deadline (helper pid {self.pid})",
            hint="a snapshot that it still makes will be removed; see the kernel log for why it hangs",
        )

    def reap(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the helper's end; return whether it ended."""
        if not self._reaped:
            try:
                self._reaped = ends_by(self.pid, time.monotonic() + timeout_s)
            except ChildProcessError:
                self._reaped = True
        return self._reaped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._order)
        os.close(self._outcome)
        self.reap(timeout_s=1.0)


def _helper(armed: Armed, undo: Callable[[Shot], None], order: int, outcome: int) -> None:
    """Wait for the deadline, fire, report, exit. Runs in the child and never returns."""
    try:
        # A new session: Ctrl-C at the terminal reaches only the parent.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        keep_only({order, outcome, *armed.fds})
        # A collection would touch, and so copy, every page that we share with the parent, while the lock is held.
        gc.disable()
        if isinstance(armed, Readying):
            armed.get_ready()
        os.write(outcome, _READY)
        data = os.read(order, _DEADLINE.size)
        if len(data) == _DEADLINE.size:
            _fire(armed, undo, _DEADLINE.unpack(data)[0], outcome)
    finally:
        # Not sys.exit: that would run the parent's cleanup handlers.
        os._exit(0)


def _fire(armed: Armed, undo: Callable[[Shot], None], deadline: float, outcome: int) -> None:
    word = _ENDED

    def announce() -> None:
        nonlocal word
        if time.monotonic() <= deadline:
            word = b""
            with suppress(BrokenPipeError):  # the parent is gone: handled below
                os.write(outcome, _FIRED)

    if isinstance(armed, Announcing):
        armed.fired = announce
    try:
        result = _Outcome(shots=armed.fire(deadline))
    except FireError as error:
        result = _Outcome(shots=error.shots, error=error.message, hint=error.hint)
    except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
        result = _Outcome(error=f"{type(error).__name__}: {error}")
    wanted = not word or time.monotonic() <= deadline
    if wanted:
        try:
            data = msgspec.msgpack.encode(result)
            os.write(outcome, word + _LENGTH.pack(len(data)) + data)
        except OSError:
            wanted = False  # the parent is gone
    if not wanted:
        for shot in result.shots:
            undo(shot)
