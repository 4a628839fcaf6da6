"""A tool backup as the source of a snapshot: where it is staged, and what a snapshot of it needs to know."""

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
        raise ConfigError(f"the staging folder {root} is not there", hint="mount its storage, or make it")
    return root


class ToolBackup(Protocol):
    """A backup by the server's own tool, complete and sealed in the staging folder."""

    @property
    def path(self) -> str:
        """Its folder."""

    @property
    def server(self) -> ServerRecord:
        """The server that it is of."""

    @property
    def position(self) -> Position | None:
        """Its binlog position; None if the tool recorded none."""

    @property
    def sources(self) -> tuple[SourcePosition, ...]:
        """Of a replica: where its sources were."""

    @property
    def record(self) -> PhysicalRecord:
        """What the manifest keeps of it."""

    def require_unchanged(self) -> None:
        """Raise NotQuiescedError, with the names, if a file has changed since the seal."""
