"""Makes one clone with the client program: flushes before, completes and compares afterwards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, StorageError
from snapmgr.api.copystore import DATA, FolderCopy, entries, subfolder
from snapmgr_juicefs import tree
from snapmgr_juicefs.program import clone_arguments, complaint

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.api import Held, Runner, Volume
    from snapmgr.api.copystore import Folder
    from snapmgr_juicefs.program import Juicefs

_STARTED = "cloning"
# Measured with Redis and SQLite on 2 cores: 35 to 220 µs per entry in the clone, about as much to flush a clean one.
# Other metadata engines are slower (218 entries/s were reported): the forecast is wrong for those.
_ENTRY_S = 400e-6
_FIXED_S = 0.15


class ClientClone(FolderCopy):
    """A clone made by ``juicefs clone``; if there is a lock, the program is started before it."""

    def __init__(
        self,
        source: Folder,
        target: Folder,
        *,
        program: Juicefs,
        runner: Runner,
        check_room: Callable[[tree.Flushed, str], None],
    ) -> None:
        """Also take the program, and the function that refuses a clone in a folder without room for it."""
        super().__init__(source, target)
        self._program = program
        self._runner = runner
        self._check_room = check_room
        self._held: Held | None = None

    def prepare(self, volume: Volume) -> None:
        """Flush the origin, and check the room."""
        seen = tree.flush(self.source.fd, volume.path)
        self._check_room(seen, os.path.dirname(self.target.path))
        self.stall_s = _FIXED_S + (seen.files + seen.folders) * _ENTRY_S

    def get_ready(self) -> None:
        """Start the program, held back."""
        self._held = self._runner.hold(self._command())

    def _command(self) -> list[str]:
        return self._program.command(*clone_arguments(self.source.path, self.data))

    def flush(self) -> None:
        """Flush every file: a clone holds only flushed data."""
        tree.flush(self.source.fd, self.source.path)

    def run(self, deadline: float) -> None:  # noqa: ARG002 - the program cannot be stopped between two files
        """Flush once more (writers have stopped by now), clone, and complete the clone."""
        seen = tree.flush(self.source.fd, self.source.path)
        os.close(os.open(_STARTED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self.target.fd))
        try:
            if self._held is not None:
                with self._held as held:
                    held.run()
            else:
                self._runner.run(self._command(), timeout_s=None)
        except CommandError as error:
            raise StorageError(complaint(error.message), hint=error.hint) from error
        with subfolder(DATA, self.target.fd) as data:
            tree.complete(data, seen, self.source.path)


def was_interrupted(folder: Folder) -> bool:
    """Return whether a clone in the folder was begun but never appeared."""
    names = {entry.name for entry in entries(folder.fd)}
    return _STARTED in names and DATA not in names
