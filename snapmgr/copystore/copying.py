"""Defines one copy to make, from its preparation to its data; each backend implements it in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import SnapmgrError
from snapmgr.copystore.copyfolder import DATA
from snapmgr.copystore.durability import flush

if TYPE_CHECKING:
    from snapmgr.contract.records import Volume
    from snapmgr.copystore.copyfolder import Folder


class OpenFolder(Struct, frozen=True, kw_only=True):
    """An open folder."""

    path: str
    fd: int


class FolderCopy(ABC):
    """A copy of the folder `source` that becomes the folder ``data`` in the folder `target`.

    `prepare`, `get_ready` and `flush` are called only for the copy of a volume, before `run`; clones of snapshots and
    of other folders need only `run`.
    """

    stall_s = 0.0
    """Forecast of how long `run` takes; `prepare` may set it."""

    def __init__(self, source: Folder, target: Folder) -> None:
        """Take both; they stay open until the copy is made."""
        self.source = source
        self.target = target
        self.data = f"{target.path}/{DATA}"

    def prepare(self, volume: Volume) -> None:  # noqa: B027 - not every copy needs it
        """Check everything that could make `run` fail: rights, room. Raises StorageError, MissingRequirementError."""

    def get_ready(self) -> None:  # noqa: B027 - not every copy needs it
        """Do the last preparations in the process that runs the copy; see `snapmgr.api.Readying`.

        Errors are ignored: `run` tries again, and fails.
        """

    def flush(self) -> None:
        """Write the origin's dirty data to the storage; by default its whole file system's. Raises StorageError."""
        flush(self.source.fd, self.source.path)

    @abstractmethod
    def run(self, deadline: float) -> None:
        """Make the folder `data` with all its contents; do not begin another file after `deadline`.

        The deadline is of time.monotonic() and may be infinite. Raises SnapmgrError or OSError; the kit then removes
        the unfinished copy.
        """


def explain(error: SnapmgrError | OSError) -> tuple[str, str | None]:
    """Return why a copy failed, and the hint, for the message of another error."""
    if isinstance(error, SnapmgrError):
        return error.message, error.hint
    return error.strerror or str(error), None
