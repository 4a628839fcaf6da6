"""The published ladder: settings of the tool and of a client's mount, one rung after the other, with the same backup.

Published for a client program before an object store: 62 s by default, 33 with more memory for the tool, 23 with more
io threads, 11.8 with writeback, 11.2 and 6.9 with a larger cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.bench.model import Check, Outcome
from snapmgr.contract.abilities import FolderCloning, Remounting
from snapmgr.physical.tools.choose import tool_for
from snapmgr.physical.tuning.ladder import Try
from snapmgr.physical.tuning.rungs import RungSettings
from snapmgr.physical.tuning.storagebench import StorageBench
from snapmgr.physical.tuning.tune import climb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from snapmgr.bench.model import Workbench
    from snapmgr.physical.prepare.backupfolder import BackupFolder

_LIMIT_S = 3600.0
_LEAST_CACHE_BYTES = 32 << 20
_CACHE_SHARE = 10
_THREADS, _MORE_THREADS = 16, 64

TITLES = {
    "default": "Ladder: a private mount with a small cache",
    "memory": "Ladder: and memory for all pages that the redo log changes",
    "threads": f"Ladder: and {_THREADS} io threads",
    "writeback": "Ladder: and writeback",
    "cache": f"Ladder: and a cache for all data, and {_MORE_THREADS} io threads",
}
"""Of the rungs, from the lowest on."""


@dataclass(kw_only=True)
class PrepareOutcome(Outcome):
    """An outcome with what is compared at its end."""

    tables: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Checksum by table, by way or rung."""


def rungs(data_bytes: int, memory_bytes: int) -> dict[str, RungSettings]:
    """Return the settings of each rung. Pure.

    Args:
        data_bytes: of the backup.
        memory_bytes: what the tool needs for all pages that it changes.
    """
    default = RungSettings(cache_bytes=max(data_bytes // _CACHE_SHARE, _LEAST_CACHE_BYTES))
    memory = replace(default, use_memory_bytes=memory_bytes)
    threads = replace(memory, io_threads=_THREADS)
    writeback = replace(threads, writeback=True)
    cache = replace(writeback, cache_bytes=2 * data_bytes, io_threads=_MORE_THREADS)
    return dict(zip(TITLES, (default, memory, threads, writeback, cache), strict=True))


def climb_ladder(
    bench: Workbench,
    outcome: PrepareOutcome,
    *,
    base: Path,
    backup: BackupFolder,
    storage: tuple[FolderCloning, Remounting],
    memory_bytes: int,
) -> None:
    """Prepare a clone of the backup at each rung, through a private mount with an empty cache, and once on scratch.

    Adds to the outcome the seconds by rung ("default_s"), until all is in the storage, and "scratch_s". `storage` is
    one backend, in the two abilities that are needed of it. Caches and scratch lie in the workbench's folder: on the
    storage itself they would not be local.
    """
    info, data_bytes = backup.info, sum(backup.sizes.values())
    measuring = StorageBench(
        source=str(base),
        beside=str(base.parent),
        info=info,
        tool=tool_for(info),
        cloning=storage[0],
        remounting=storage[1],
        data_bytes=data_bytes,
        scratch_dir=str(bench.folder),
        cache_root=str(bench.folder),
        log=str(bench.folder / "prepare.log"),
    )
    failed: list[str] = []
    ladder = rungs(data_bytes, memory_bytes)
    tries = (Try(settings=one, limit_s=_LIMIT_S, why="the published ladder", check=True) for one in ladder.values())

    def begin(step: Try) -> None:
        bench.quiet()
        bench.cold()
        bench.tell(f"ladder: {step.settings}")

    for name, found in zip(ladder, climb(measuring, tries, [], begin=begin), strict=True):
        if found.failure is not None or found.run.cut:
            failed.append(f"{name}: {found.failure or 'it took too long'}")
            continue
        outcome.metrics[f"{name}_s"] = found.run.seconds
        if found.checked is not None:
            outcome.tables[name] = found.checked.tables or {"not read": found.checked.why_not}
        outcome.notes.append(f"{name}: {found.run.settings}; {found.verdict}")
    bench.quiet()
    bench.cold()
    bench.tell("copied to scratch, and prepared there")
    scratch = measuring.scratch(_LIMIT_S)
    if scratch is None:
        outcome.notes.append(f"no room for a copy in {bench.folder}")
    elif scratch.failure is not None:
        failed.append(f"scratch: {scratch.failure}")
    else:
        outcome.metrics["scratch_s"] = scratch.copy_s + scratch.tool_s
        outcome.metrics["scratch_tool_s"] = scratch.tool_s
    outcome.checks.append(Check(name="every rung of the ladder was prepared", ok=not failed, detail="; ".join(failed)))
