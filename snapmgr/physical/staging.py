"""Makes and removes a job's staging folder, STAGING/JOB: a mark in it shows that it is ours, during a run only."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import ConfigError, StorageError
from snapmgr.source.toolbackup import staging_root
from snapmgr.system.boot import machine_id
from snapmgr.system.files import space_hint, write_file
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from snapmgr.config.model import Job
    from snapmgr.context import Context

_MARK = ".snapmgr-staging"


class Staging:
    """The folder. The caller holds the job's lock.

    Raises ConfigError if `staging` overlaps the datadir, or if the folder exists and is not ours.
    """

    def __init__(self, ctx: Context, job: Job, datadir: str) -> None:
        root = os.path.realpath(staging_root(job))
        if lies_in(root, datadir) or lies_in(datadir, root):
            raise ConfigError(
                f"the staging folder {root} and the datadir {datadir} are in one another",
                hint="name a folder on other storage",
            )
        self.path = Path(root, job.name)
        self.data = self.path / "data"
        self.increment = self.path / "increment"
        self._mark = {"job": job.name, "state_dir": str(ctx.catalog.path.absolute()), "machine_id": machine_id()}

    def begin(self) -> None:
        """Make the folder with its mark alone, and remove the leftovers of a killed run."""
        if self.path.is_symlink() or (self.path.exists() and not self._is_ours()):
            raise ConfigError(
                f"{self.path} is there and was not made by this job",
                hint="move it away, or name another staging folder",
            )
        self.end()
        try:
            # The server's user must be able to pass through: MySQL's CLONE makes its folder itself.
            self.path.mkdir(mode=0o711)
            write_file(self.path / _MARK, json.dumps(self._mark).encode())
        except OSError as error:
            raise StorageError(f"cannot make {self.path}: {error.strerror}", hint=space_hint(error)) from None

    def end(self) -> None:
        """Remove the folder and everything in it, the mark last. Idempotent."""
        if not self.path.is_dir():
            return
        try:
            for found in sorted(self.path.iterdir()):
                if found.name != _MARK:
                    shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()
            (self.path / _MARK).unlink(missing_ok=True)
            self.path.rmdir()
        except OSError as error:
            raise StorageError(f"cannot remove {error.filename}: {error.strerror}") from None

    def _is_ours(self) -> bool:
        try:
            if all(_MARK in found.name and found.name != _MARK for found in self.path.iterdir()):
                return True  # killed before its mark was there
            return bool(json.loads((self.path / _MARK).read_text()) == self._mark)
        except (OSError, ValueError):
            return False
