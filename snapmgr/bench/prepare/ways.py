"""The ways in which the scenario prepare makes a datadir of a backup, on the storage that the backup is on."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.contract.abilities import Remounting
from snapmgr.contract.errors import MissingRequirementError, StorageError
from snapmgr.stage.prepare.inplace import Settings, apply_in_place
from snapmgr.stage.prepare.overlay import copied_up, overlay
from snapmgr.stage.prepare.ownership import take_owners
from snapmgr.stage.prepare.scratchcopy import copy_to_scratch
from snapmgr.stage.prepare.writeback import outline_of, write_back
from snapmgr.stage.tool import tool_for

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.bench.model import Workbench
    from snapmgr.contract.abilities import FolderCloning
    from snapmgr.stage.prepare.backupfolder import Backup


@dataclass(kw_only=True)
class Site:
    """Where one sample takes place. A way takes it and an empty folder of its own in the storage.

    It returns the folder of its result, and how many seconds the tool alone took.
    """

    bench: Workbench
    base: Path
    backup: Backup
    settings: Settings
    cloning: FolderCloning | None

    @property
    def local(self) -> bool:
        """Whether no client program is between the storage and its disk."""
        return not isinstance(self.cloning, Remounting)

    def applied(self, folder: str) -> float:
        """Prepare in place; return the seconds of the tool alone."""
        return apply_in_place(
            folder, tool_for(self.backup.staged), self.settings, log=str(self.bench.folder / "prepare.log")
        ).tool_s


def copied(site: Site, work: Path) -> tuple[Path, float]:
    """Do as somebody without snapmgr would."""
    result = work / "data"
    site.bench.run(["cp", "--archive", "--reflink=never", str(site.base), str(result)])
    return result, site.applied(str(result))


def scratch(site: Site, work: Path) -> tuple[Path, float]:
    """As the strategy "scratch", with scratch space on the same disk."""
    result = work / "data"
    copy_to_scratch(str(site.base), str(result))
    tool_s = site.applied(str(result))
    take_owners(str(site.base), str(result), sync=False)
    return result, tool_s


def cloned(site: Site, cloning: FolderCloning, work: Path) -> tuple[Path, float]:
    """As the strategy "storage"."""
    result = work / "data"
    cloning.clone_folder(str(site.base), str(result))
    tool_s = site.applied(str(result))
    take_owners(str(site.base), str(result), sync=True)
    return result, tool_s


def overlaid(site: Site, cloning: FolderCloning, work: Path) -> tuple[Path, float]:
    """As the strategy "overlay", with scratch space on the same disk."""
    result, over = work / "data", work / "overlay"
    over.mkdir(mode=0o700)
    before = outline_of(str(site.base))
    with overlay(str(site.base), str(over)) as (merged, upper):
        tool_s = site.applied(merged)
        cloning.clone_folder(str(site.base), str(result))
        write_back(merged, str(result), before, only=copied_up(upper))
    take_owners(str(site.base), str(result), sync=True)
    shutil.rmtree(over)
    return result, tool_s


def overlay_refused(site: Site) -> str | None:
    """Return why the kernel overlays nothing there; None if it does."""
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
