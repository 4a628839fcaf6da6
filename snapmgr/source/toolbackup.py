"""Describes a tool backup as the source of a snapshot. A protocol, so that `source` does not import its makers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Position, ServerRecord, SourcePosition
    from snapmgr.catalog.physical import PhysicalRecord
    from snapmgr.config.model import Job


def staging_root(job: Job) -> str:
    """Return the job's `staging` folder. Raises ConfigError if it does not exist."""
    root = str(job.staging)
    if not os.path.isdir(root):
        raise ConfigError(f"the staging folder {root} does not exist", hint="mount its storage, or create the folder")
    return root


class ToolBackup(Protocol):
    """A backup by the server's own tool, complete and sealed in the staging folder."""

    @property
    def path(self) -> str:
        """Its folder."""

    @property
    def server(self) -> ServerRecord:
        """Its server."""

    @property
    def position(self) -> Position | None:
        """Its binlog position; None if the tool recorded none."""

    @property
    def sources(self) -> tuple[SourcePosition, ...]:
        """For a replica: the positions of its sources."""

    @property
    def record(self) -> PhysicalRecord:
        """Its record in the manifest."""

    def require_unchanged(self) -> None:
        """Raise NotQuiescedError, with the names, if a file has changed since the seal."""
