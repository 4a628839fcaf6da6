"""Bundles what every job needs: configuration, catalog, the machine's programs and mounts, and output for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct, field

from snapmgr.catalog.store import Catalog
from snapmgr.config.plugins import make_backend
from snapmgr.contract.errors import MissingRequirementError
from snapmgr.system.mount import KernelMounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.store import Entry
    from snapmgr.config.model import Config
    from snapmgr.contract.backend import Backend, Runner
    from snapmgr.contract.records import Gauge, Pool, PoolKey


def _make_runner() -> Runner:
    from snapmgr.system.command import CommandRunner  # noqa: PLC0415 - the command line has its own

    return CommandRunner()


def _ignore_line(_line: str) -> None:
    pass


def _ignore_progress(_what: str, _done: int, _total: int) -> None:
    pass


class PoolReading(Struct, kw_only=True):
    """The spaces of a pool, as this process read them last; see `snapmgr.capacity.read`."""

    gauges: tuple[Gauge, ...]
    at_s: float
    """time.monotonic()."""
    kept: bool = False
    """Whether it is among the pool's samples on disk."""


class Context(Struct, frozen=True, kw_only=True):
    """The environment of one process. `tell` gets a line for people; `progress` a step, the count and the total."""

    config: Config
    catalog: Catalog
    runner: Runner = field(default_factory=_make_runner)
    mounter: KernelMounter = field(default_factory=KernelMounter)
    tell: Callable[[str], None] = _ignore_line
    progress: Callable[[str, int, int], None] = _ignore_progress
    readings: dict[PoolKey, PoolReading] = field(default_factory=dict)
    """Cleared when a snapshot is deleted."""
    _backends: dict[str, Backend] = field(default_factory=dict)
    _usable: set[str] = field(default_factory=set)

    def resolve(self, name: str) -> Entry:
        """Return the snapshot that `name` means, as `Catalog.resolve` does; tell what "latest" passes over."""
        return self.catalog.resolve(name, self.tell)

    def remember(self, pool: Pool, gauges: tuple[Gauge, ...]) -> PoolReading:
        """Note what was read of a pool now."""
        reading = self.readings[pool.key] = PoolReading(gauges=gauges, at_s=time.monotonic())
        return reading

    def backend(self, name: str) -> Backend:
        """Return the backend `name`, configured.

        Raises MissingRequirementError if a requirement is missing on this machine.
        """
        backend = self.unchecked_backend(name)
        if name not in self._usable:
            missing = backend.missing()
            if missing:
                raise MissingRequirementError(
                    f"the {name} backend cannot work here: {'; '.join(reason.what for reason in missing)}",
                    hint="; ".join(reason.hint for reason in missing),
                )
            self._usable.add(name)
        return backend

    def unchecked_backend(self, name: str) -> Backend:
        """Return the backend `name`, configured, even if requirements are missing here."""
        if name not in self._backends:
            table = self.config.backends.get(name, {})
            self._backends[name] = make_backend(name, table, self.runner, self.mounter)
        return self._backends[name]
