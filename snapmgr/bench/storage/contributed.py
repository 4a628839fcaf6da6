"""Adds the storages that plugins contribute to those that come with snapmgr."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from snapmgr.bench.model import Stack
from snapmgr.bench.storage.stacks import STACKS
from snapmgr.config.plugins import list_plugins
from snapmgr.contract.abilities import Benchmarked
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.config.plugins import Plugin

# Samples are files with the name of their storage; see `snapmgr.bench.results.samples`.
_NAME = re.compile(r"[a-z0-9+.-]+")


def all_stacks() -> Mapping[str, Stack]:
    """Return all storages by name: those with snapshots that come with snapmgr, plugins' own, and the controls.

    Raises SnapmgrError if a plugin gives a storage a name that is taken, or that cannot be one.
    """
    found = {name: stack for name, stack in STACKS.items() if stack.backend is not None}
    controls = {name: stack for name, stack in STACKS.items() if stack.backend is None}
    for plugin in list_plugins():
        if plugin.backend is None or not issubclass(plugin.backend, Benchmarked):
            continue
        for storage in plugin.backend.bench_storages():
            if storage.name in found or storage.name in controls:
                raise _unfit(plugin, storage.name, "which exists already")
            if not _NAME.fullmatch(storage.name):
                raise _unfit(plugin, storage.name, "which is no name (small letters, digits, +, . and -)")
            found[storage.name] = Stack(
                name=storage.name,
                title=storage.title,
                backend=plugin.name,
                options=dict(storage.options),
                settings=dict(storage.settings),
            )
    return found | controls


def _unfit(plugin: Plugin, name: str, why: str) -> SnapmgrError:
    return SnapmgrError(
        f"the backend {plugin.name} (of {plugin.distribution}) contributes a storage {name!r} to the benchmark, {why}",
        hint=f"report this to the authors of {plugin.distribution.partition(' ')[0]}, or uninstall it",
    )
