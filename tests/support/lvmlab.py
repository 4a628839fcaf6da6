"""The lab of the contract suite over the LVM backend."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.system.blockdev import read_mounts
from snapmgr.testing import Lab
from snapmgr_lvm import LvmBackend, LvmConfig
from support.lvm import run
from support.storage import work_folder
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from snapmgr.api import Pool, SnapshotRef
    from support.lvm import Origin, VolumeGroup

_POOL = "pool"
_NOTHING = 'devices { filter=["r|.*|"] use_devicesfile=0 obtain_device_list_from_udev=0 scan=["/dev"] }\n'


class LvmLab(Lab):
    """A volume group; each origin is a folder on a logical volume of its own."""

    # On the one processor of a guest, beside a process that writes without pause.
    race_rounds = 2
    # tests/guest/test_kill.py kills LVM's programs at each step that matters.
    kills = 7 if CAMPAIGN else 1
    rounds = 1
    looks = 2
    files = 60

    def __init__(self, group: VolumeGroup, kind: Literal["classic", "thin"], scratch: Path) -> None:
        """Take also what kind of snapshots to make, and a folder for what is written to attachments."""
        super().__init__(LvmBackend, LvmConfig(cow_size="60%", scratch_dir=str(scratch)))
        self.group = group
        self.kind = kind
        self._origins: dict[Path, Origin] = {}

    def close(self) -> None:
        """Remove all but what the next test uses again: the thin pool, and classic origins that are as good as new."""
        # Without the parts of a pool, "[pool_tdata]": they go with it.
        tags = {row["lv_name"]: row["lv_tags"] for row in self.group.lvs("lv_name", "lv_tags")}
        names = {name for name in tags if not name.startswith("[")}
        kept = [one for one in self._origins.values() if self._as_new(one) and tags.get(one.lv) == ""]
        for origin in self._origins.values():
            if origin not in kept:
                run("umount", "--recursive", origin.point)
        self._origins.clear()
        staying = {_POOL, *(origin.lv for origin in (*kept, *self.group.spare))}
        if names - staying:
            others = " && ".join(f"lv_name!={name}" for name in sorted(staying))
            run("lvremove", "--yes", "--select", others, self.group.name)
        # Not before: each of their snapshots would get copies of what is overwritten.
        for origin in kept:
            for path in origin.point.iterdir():
                if path.name != "lost+found":
                    shutil.rmtree(path)
        self.group.spare += kept

    def _as_new(self, origin: Origin) -> bool:
        """Whether an origin is classic and mounted, once, with nothing mounted in it."""
        mounts = [mount.point for mount in read_mounts() if Path(mount.point).is_relative_to(origin.point)]
        return self.kind == "classic" and mounts == [str(origin.point)]

    def make_origin(self) -> Path:
        """Make a logical volume with a file system on it: ext4, or XFS where it is thin. Or take a spare one."""
        name = f"lab{secrets.token_hex(3)}"
        if self.kind == "classic":
            spare = self.group.spare
            origin = spare.pop() if spare else self.group.classic_origin(name, size_mib=128)
        else:
            if _POOL not in self.group.names():
                self.group.pool(_POOL, data_mib=2048, metadata_mib=16)
            origin = self.group.thin_origin(name, size_mib=320)
        # Not the mount point itself: ext4's lost+found is none of the contract's files.
        folder = origin.point / "data"
        folder.mkdir()
        self._origins[folder] = origin
        return folder

    def remove_origin(self, origin: Path) -> None:
        """Unmount and remove the logical volume; classic snapshots of it go with it."""
        volume = self._origins.pop(origin)
        run("umount", volume.point)
        run("lvremove", "--yes", f"{volume.vg}/{volume.lv}")

    def trim(self, origin: Path) -> None:
        """Discard what the file system does not use: only then has the thin pool it back."""
        if self.kind == "thin":
            run("fstrim", self._origins[origin].point)

    def inside(self, volume_root: Path, origin: Path) -> Path:
        """Return the origin's folder; without a look at the storage each time."""
        return volume_root / origin.name

    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        """Put a plain volume under the snapshot's name, with the snapshot's tags."""
        path = f"{self.group.name}/{ref.name}"
        tags = next(row["lv_tags"] for row in self.group.lvs("lv_name", "lv_tags") if row["lv_name"] == ref.name)
        run("lvremove", "--yes", path)
        added = [word for tag in tags.split(",") for word in ("--addtag", tag)]
        run("lvcreate", "--yes", "--size", "4m", *added, "--name", ref.name, self.group.name)
        return lambda: ref.name in self.group.names()

    @contextmanager
    def unreachable(self, pool: Pool) -> Iterator[None]:
        """Hide all disks from LVM's programs."""
        del pool
        usual = os.environ.get("LVM_SYSTEM_DIR")
        with work_folder() as folder:
            (folder / "lvm.conf").write_text(_NOTHING)
            os.environ["LVM_SYSTEM_DIR"] = str(folder)
            try:
                yield
            finally:
                if usual is None:
                    del os.environ["LVM_SYSTEM_DIR"]
                else:
                    os.environ["LVM_SYSTEM_DIR"] = usual
