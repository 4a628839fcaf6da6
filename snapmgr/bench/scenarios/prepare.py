"""Measures the time to prepare a physical backup: in the ways that a storage allows, and on the published ladder."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.bench.device.target import DEFAULT_FOLDER
from snapmgr.bench.load.mariadb import PROGRAMS
from snapmgr.bench.measure.layout import read_layout
from snapmgr.bench.measure.proof import flush
from snapmgr.bench.model import Check, Needs, Outcome, Scenario, metric
from snapmgr.bench.prepare.ladder import TITLES, PrepareOutcome, climb_ladder
from snapmgr.bench.prepare.redobackup import TABLES, KeptFolder, RedoLoad, make_backup
from snapmgr.contract.abilities import Remounting
from snapmgr.contract.errors import ConfigError, MissingRequirementError, StorageError, VerificationError
from snapmgr.contract.units import format_size
from snapmgr.physical.prepare.backupfolder import inspect
from snapmgr.physical.prepare.inplace import ApplySettings, apply_in_place, choose_memory
from snapmgr.physical.prepare.order import PrepareOrder
from snapmgr.physical.prepare.overlay import overlay
from snapmgr.physical.prepare.run import prepare_folder
from snapmgr.physical.seal import compare, seal
from snapmgr.physical.tools.choose import tool_for
from snapmgr.physical.tuning.checksums import table_checksums
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from snapmgr.bench.model import Parameters, ProfileName, Workbench
    from snapmgr.contract.abilities import FolderCloning
    from snapmgr.physical.prepare.backupfolder import BackupFolder
    from snapmgr.physical.prepare.choice import Strategy

_MIB = 1 << 20
_SIZES: Mapping[ProfileName, int] = {
    "smoke": 16 * _MIB,
    "quick": 512 * _MIB,
    "standard": 4096 * _MIB,
    "paper": 20480 * _MIB,
}
_DATA_PER_REDO = 16
_LEAST_REDO_BYTES = 8 * _MIB
# The server's own tables, undo log and system tablespace, and the reserve in its files.
_AROUND_BYTES = 128 * _MIB
# Share of the machine's memory for the buffer pool of the server that makes the backup.
_POOL_SHARE = 0.5
_REDO_OFF = 2.0
"""The redo log may be larger or smaller than requested by this factor."""
_START_S = 600.0
# Time until servers have reported their tables' checksums, for all ways together.
_SERVERS_S = 4.0
_WAYS = {
    "copy": "copied file by file, and prepared there",
    "scratch": "copied by 12 readers at once, and prepared there",
    "storage": "prepared on a clone",
    "overlay": "prepared in an overlay, changed files written back to a clone",
}


@dataclass(frozen=True, kw_only=True)
class Site:
    """The backup of one sample, and the means to prepare it."""

    bench: Workbench
    base: Path
    backup: BackupFolder
    settings: ApplySettings
    cloning: FolderCloning | None

    @property
    def local(self) -> bool:
        """Return whether the storage uses its disk directly, without a client program."""
        return not isinstance(self.cloning, Remounting)


class Prepare(Scenario):
    """See `snapmgr.bench.model.Scenario`."""

    name = "prepare"
    title = "How long does it take to make a datadir of a physical backup, and what does the backup's clone save?"
    label = "Preparing a backup"
    programs = (*PROGRAMS, "mariadb-backup")
    metrics = (
        metric(
            "best_s",
            "Until a backup is prepared, by the quickest of the ways that there are",
            "s",
            "less",
            headline=True,
        ),
        *(
            info
            for way, title in _WAYS.items()
            for info in (
                metric(f"{way}_s", f"Backup {title}", "s", "less"),
                metric(f"{way}_tool_s", f"Backup {title}: the tool alone", "s", "less"),
                metric(f"{way}_written_bytes", f"Backup {title}: written at the device", "B", "less"),
                metric(f"{way}_space_bytes", f"Backup {title}: blocks of its own", "B", "less"),
                metric(
                    f"{way}_taken_bytes",
                    f"Backup {title}: what is less free then, reserved space included",
                    "B",
                    "less",
                ),
            )
        ),
        metric("storage_over_copy", "Prepared on a clone ÷ copied file by file and prepared", "", "less"),
        *(metric(f"{rung}_s", title, "s", "less") for rung, title in TITLES.items()),
    )

    def __init__(self) -> None:
        self._kept: dict[RedoLoad, KeptFolder] = {}
        self._turns: dict[str, int] = {}

    def parameters(self, given: Parameters) -> Parameters:
        """Complete them: size of the redo log and the tool's buffer pool. Raises ConfigError for too little memory."""
        size_bytes = given.size_bytes or _SIZES[given.profile]
        extra: dict[str, Any] = {"redo_bytes": max(size_bytes // _DATA_PER_REDO, _LEAST_REDO_BYTES)} | dict(given.extra)
        # It is not part of a strategy, so it is the same on every stack and in every way.
        extra.setdefault("use_memory_bytes", choose_memory(extra["redo_bytes"], given.memory_bytes))
        pool_bytes = RedoLoad(data_bytes=size_bytes, redo_bytes=extra["redo_bytes"]).pool_bytes
        if pool_bytes > given.memory_bytes * _POOL_SHARE:
            raise ConfigError(
                f"prepare with {format_size(size_bytes)} of data and {format_size(extra['redo_bytes'])} of redo log "
                f"makes them by a server with a buffer pool of {format_size(pool_bytes)}, and there are "
                f"{format_size(given.memory_bytes)} of memory",
                hint="use a smaller --size",
            )
        return replace(given, size_bytes=size_bytes, extra=extra)

    def needs(self, parameters: Parameters) -> Needs:
        """Return the needs of a sample; the first one of a run also makes the backup."""
        data_bytes, redo_bytes = parameters.size_bytes + _AROUND_BYTES, parameters.extra["redo_bytes"]
        # The server beside its backup, or the backup with a copy and the changes of another.
        space_bytes = 3 * data_bytes + 4 * redo_bytes + _AROUND_BYTES
        return Needs(space_bytes=space_bytes, seconds=_SERVERS_S + 3 * (data_bytes + redo_bytes) / 100e6)

    def run(self, bench: Workbench) -> Outcome:
        """Prepare the same backup in every way, each time from a cold cache, and compare the tables."""
        extra, found = bench.parameters.extra, PrepareOutcome()
        load = RedoLoad(data_bytes=bench.parameters.size_bytes, redo_bytes=extra["redo_bytes"])
        base = bench.path / "backup"
        found.notes += self._put(bench, load, base)
        backup = inspect(str(base))
        sealed = seal(str(base), checksums=True)
        settings = ApplySettings(use_memory_bytes=extra["use_memory_bytes"])
        found.notes.append(
            f"the backup: {format_size(sealed.size_bytes)} in {sealed.files} files, of which "
            f"{format_size(backup.redo_bytes)} are redo log; the tool's buffer pool: "
            f"{format_size(settings.use_memory_bytes)}"
        )
        site = Site(bench=bench, base=base, backup=backup, settings=settings, cloning=bench.cloning())
        self._each_way(site, found)
        changed = compare(str(base), sealed, contents=True)
        found.checks += [
            Check(name="the backup is what it was", ok=not changed, detail="; ".join(changed[:5])),
            Check(
                name="the redo log is about as large as asked for",
                ok=1 / _REDO_OFF <= backup.redo_bytes / load.redo_bytes <= _REDO_OFF,
                detail=f"{format_size(backup.redo_bytes)} of {format_size(load.redo_bytes)}",
            ),
            tables_agree(found.tables),
        ]
        found.metrics |= derived(found.metrics)
        return found

    def close(self) -> None:
        """Forget the backups that are kept for further samples."""
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()

    def _put(self, bench: Workbench, load: RedoLoad, base: Path) -> list[str]:
        """Put the backup, the same for all samples of a run, into the storage. Return notes about it."""
        if load in self._kept:
            bench.tell("copies the backup into the storage")
            self._kept[load].put(base)
            return []
        bench.tell(f"makes a backup with {format_size(load.redo_bytes)} of redo log")
        datadir = bench.path / "server"
        make_backup(load, datadir=datadir, target=base, folder=bench.folder / "m", runner=CommandRunner())
        shutil.rmtree(datadir)
        kept = self._keep(base)
        if kept is None:
            return ["there was no room to keep the backup for other samples: each has one of its own"]
        # Written again, as for the other samples: by one writer, file after file.
        self._kept[load] = kept
        shutil.rmtree(base)
        kept.put(base)
        return ["the backup was made on this sample's storage, and written to it again"]

    def _keep(self, base: Path) -> KeptFolder | None:
        size_bytes = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
        if shutil.disk_usage(DEFAULT_FOLDER).free < 2 * size_bytes:
            return None
        return KeptFolder(base, DEFAULT_FOLDER)

    def _each_way(self, site: Site, found: PrepareOutcome) -> None:
        bench, cloning = site.bench, site.cloning
        ways: dict[str, Callable[[Path], tuple[Path, float]]] = {"copy": partial(copied, site)}
        if site.local:
            ways["scratch"] = partial(prepared, site, "scratch")
            found.notes.append("no ladder: that is one of a client's mount options, and this storage has no client")
        else:
            # Scratch is elsewhere: see the ladder.
            found.notes.append("how much space a prepared clone takes is not known: the client counts each clone whole")
        if cloning is None:
            found.notes.append(f"{bench.stack.title}: no folder can be cloned there, only copied")
        else:
            ways["storage"] = partial(prepared, site, "storage")
            refused = _overlay_refused(site) if site.local else "its changed files would lie on the storage itself"
            if refused is None:
                ways["overlay"] = partial(prepared, site, "overlay")
            else:
                found.notes.append(f"no overlay: {refused}")
        # The first way changes each time; it is the same on all stacks with the same number of ways.
        turn = self._turns.get(bench.stack.name, 0)
        self._turns[bench.stack.name] = turn + 1
        names = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
        for name in names:
            figures, found.tables[name] = _measured(site, name, ways[name])
            found.metrics.update(figures)
        if cloning is not None and isinstance(cloning, Remounting):
            climb_ladder(
                bench,
                found,
                base=site.base,
                backup=site.backup,
                storage=(cloning, cloning),
                memory_bytes=site.settings.use_memory_bytes,
            )


def copied(site: Site, work: Path) -> tuple[Path, float]:
    """Copy and prepare as without snapmgr; return the result's folder and the seconds of the tool alone."""
    result = work / "data"
    site.bench.run(["cp", "--archive", "--reflink=never", str(site.base), str(result)])
    tool, log = tool_for(site.backup.info), str(site.bench.folder / "prepare.log")
    return result, apply_in_place(str(result), tool, site.settings, log=log).tool_s


def prepared(site: Site, strategy: Strategy, work: Path) -> tuple[Path, float]:
    """Prepare by a strategy, on local storage with scratch space on the same disk; return as `copied`."""
    ready = prepare_folder(
        PrepareOrder(
            source=str(site.base),
            target=None if strategy == "scratch" else str(work / "data"),
            strategy=strategy,
            result="scratch" if strategy == "scratch" else "storage",
            # Scratch space is local, so behind a client it is elsewhere.
            scratch=str(work / "scratch" if site.local else site.bench.folder),
            settings=site.settings,
        ),
        site.cloning,
    )
    return Path(ready.path), dict(ready.steps)["prepare"]


def _overlay_refused(site: Site) -> str | None:
    """Return why the kernel refuses an overlay there; None if it accepts one."""
    probe = site.bench.path / "probe"
    probe.mkdir(mode=0o700)
    try:
        with overlay(str(site.base), str(probe)):
            return None
    except (MissingRequirementError, StorageError) as error:
        return error.message
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(probe)


def _measured(
    site: Site, name: str, act: Callable[[Path], tuple[Path, float]]
) -> tuple[dict[str, float], dict[str, str]]:
    """Prepare in one way from a cold cache until all is durable, and remove the result; return figures and tables."""
    bench, work = site.bench, site.bench.path / "work"
    bench.quiet()
    work.mkdir(mode=0o700)
    flush(work)
    before = _free_bytes(work)
    bench.cold()
    bench.tell(f"the backup is {_WAYS[name]}")
    with bench.measured() as measuring:
        start = time.monotonic()
        result, tool_s = act(work)
        flush(work)
        seconds = time.monotonic() - start
        # Flushing a client's file system does not flush its writes to the file system below.
        os.sync()
    figures = {
        f"{name}_s": seconds,
        f"{name}_tool_s": tool_s,
        f"{name}_written_bytes": float(measuring.spent.written_bytes),
    }
    if site.local:
        # XFS reserves 128 KiB around each page written in a clone, for about five minutes.
        figures[f"{name}_taken_bytes"] = float(max(before - _free_bytes(work), 0))
        figures[f"{name}_space_bytes"] = float(_own_bytes(result))
    tables = _tables(site, result)
    shutil.rmtree(work)
    return figures, tables


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bfree * room.f_frsize


def _own_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files on the device that no other file shares."""
    layouts = [read_layout(path) for path in folder.rglob("*") if path.is_file()]
    return sum(layout.mapped_bytes - layout.shared_bytes for layout in layouts)


def _tables(site: Site, result: Path) -> dict[str, str]:
    """Return the tables' checksums from a server on the result; nothing, with a note, if it does not start."""
    info = site.backup.info
    try:
        return table_checksums(
            str(result),
            flavor=info.flavor,
            version=info.server_version,
            scratch_dir=str(site.bench.folder),
            time_limit_s=_START_S,
        )
    except VerificationError as error:
        return {"no server starts on it": error.message}


def tables_agree(tables: Mapping[str, Mapping[str, str]]) -> Check:
    """Given checksums by table by way, return whether all ways have the same tables. Pure."""
    first = next(iter(tables))
    wrong = [
        f"{table}: {first} {tables[first].get(table, 'has none')}, {way} {found.get(table, 'has none')}"
        for way, found in tables.items()
        for table in sorted({*tables[first], *found})
        if found.get(table) != tables[first].get(table)
    ]
    if len(tables[first]) != TABLES:
        wrong.append(f"{first}: {len(tables[first])} tables of {TABLES}: {', '.join(tables[first].values())}")
    return Check(
        name="a server finds the same tables, whichever way they were prepared",
        ok=not wrong,
        detail="; ".join(wrong[:5]) or f"{TABLES} tables by {', '.join(tables)}",
    )


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """Given the seconds of each way, return the derived figures. Pure."""
    seconds = {name: metrics[f"{name}_s"] for name in (*_WAYS, *TITLES) if f"{name}_s" in metrics}
    found = {"best_s": min(seconds.values())}
    if "storage" in seconds:
        found["storage_over_copy"] = seconds["storage"] / seconds["copy"]
    return found


scenario = Prepare()
