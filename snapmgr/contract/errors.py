"""Defines the errors; each class has its exit code.

An error says what failed, on which object, and what to try. It is raised once, and printed once by the command line.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0


class SnapmgrError(Exception):
    """A failure with a remedy for the user.

    Args:
        message: the failed action and its object.
        hint: the next thing to try, or None.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StorageError(SnapmgrError):
    """The storage refused or failed a call."""


class ShortOfSpaceError(StorageError):
    """Less space is free than a backup must leave; nothing was changed."""


class AlteredError(StorageError):
    """A snapshot was changed after it was taken."""


class LostError(StorageError):
    """A snapshot is lost because its own space overflowed; it is BROKEN."""


class CommandError(SnapmgrError):
    """An external program failed, could not be started, or exceeded its time limit."""


class CatalogError(SnapmgrError):
    """A manifest or the state directory is damaged, unwritable or too new."""


class NoRoomError(CatalogError):
    """The file system of the state directory is full, or its quota is used up."""


class NotFoundError(SnapmgrError):
    """The named snapshot, job or mount does not exist (or no longer does)."""


class InUseError(SnapmgrError):
    """The object to be deleted or detached is mounted, being read or protected."""


class ConfigError(SnapmgrError):
    """A configuration file or the command line is invalid; nothing was done."""

    exit_code = 2


class BusyError(SnapmgrError):
    """Another run of the same job is active."""

    exit_code = 3


class NotQuiescedError(SnapmgrError):
    """The database could not be quiesced, or the lock was lost; no snapshot was kept."""

    exit_code = 4


class LaterStepError(SnapmgrError):
    """The snapshot `snapshot_id` is taken and kept, but a step after it failed."""

    exit_code = 5

    def __init__(self, message: str, *, hint: str | None = None, snapshot_id: str = "") -> None:
        super().__init__(message, hint=hint)
        self.snapshot_id = snapshot_id


class VerificationError(SnapmgrError):
    """The snapshot was tested and does not restore as it should."""

    exit_code = 6


class MissingRequirementError(SnapmgrError):
    """A requirement is missing on this machine: a program, a package, a privilege or a kernel feature."""

    exit_code = 7


class InterruptedRunError(SnapmgrError):
    """SIGINT or SIGTERM ended the run; its unfinished work was undone or recorded."""

    exit_code = 130


_GRAVEST_FIRST = (130, 2, 1, 4, 6, 5, 7, 3)


def gravest(codes: list[int]) -> int:
    """Given each job's exit code, return the most severe one, with which the process exits.

    The order among jobs is 1, 4, 6, 5, 7, 3. An interruption or a usage error ends the whole run and comes before them.
    """
    failed = [code for code in codes if code != EXIT_OK]
    if not failed:
        return EXIT_OK
    return min(failed, key=lambda code: _GRAVEST_FIRST.index(code) if code in _GRAVEST_FIRST else 2)
