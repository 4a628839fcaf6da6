"""Provides `ReflinkBackend`: snapshots as copies of a directory, whose files share their blocks with the origin's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.api import (
    API_VERSION,
    NotMine,
    Provisioned,
    ProvisionOrder,
    SnapshotRef,
    StorageError,
    StorageMaker,
    Target,
    Usage,
    Volume,
    provisioned,
    unmake,
)
from snapmgr.api.copystore import DATA, FOLDER_FLAGS, CopyStoreBackend, Folder, FolderCopy, clone_beside, subfolder
from snapmgr.api.kernel import FileSystem, holder, identify, shown
from snapmgr_reflink import survey
from snapmgr_reflink.copying import SharedCopy, can_clone

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from snapmgr_reflink.tree import Method

_DEFAULT_STORE = ".snapmgr-reflink"
# The share of a provisioned file system that the origin may fill: a copy of all of it still fits.
_SHARE = 0.45


class ReflinkConfig(Struct, frozen=True, kw_only=True):
    """``[backend.reflink]``."""

    store: str | None = None
    """Folder of the copies, on the origin's file system and outside of it. Default: ``.snapmgr-reflink`` at the top of
    the mount that holds the origin."""
    allow_plain_copy: bool = False
    """Copy the data where the file system cannot share blocks: slow, and every copy takes its full size."""


class ReflinkBackend(CopyStoreBackend):
    """See `snapmgr.api.Backend` for the contract; docs/reference/backends/reflink.md describes this one."""

    name: ClassVar[str] = "reflink"
    api_version: ClassVar[int] = API_VERSION
    Config: ClassVar[type[ReflinkConfig]] = ReflinkConfig
    config: ReflinkConfig

    def locate(self, target: Target) -> Volume | NotMine:
        """Find a place for copies of `target`; on btrfs walk it for nested subvolumes."""
        try:
            fd = os.open(target.path, FOLDER_FLAGS)
            try:
                return self._locate(target, fd)
            finally:
                os.close(fd)
        except OSError as error:
            return NotMine(reason=f"{shown(target.path)} cannot be looked at: {error.strerror}")

    def _locate(self, target: Target, fd: int) -> Volume | NotMine:
        sharing = self._can_share(identify(fd), target)
        if not sharing and not self.config.allow_plain_copy:
            return NotMine(
                reason=f"{target.mount.fs_type} at {shown(target.mount.point)} cannot share blocks between files",
                hint="use XFS (made with reflink=1) or btrfs, or set allow_plain_copy in [backend.reflink]",
                # An XFS only lacks an option of mkfs.
                foreign=target.mount.fs_type != "xfs",
            )
        store = self.config.store or os.path.join(target.mount.point, _DEFAULT_STORE)
        if store == os.path.join(target.path, _DEFAULT_STORE):
            return NotMine(
                reason=f"{shown(target.path)} is a whole file system: there is no place beside it for the store",
                hint="set store in [backend.reflink] to a folder outside of the directory",
            )
        volume = self.place(target, store)
        if isinstance(volume, NotMine):
            return volume
        if not sharing:
            return replace(
                volume,
                warnings=(f"no shared blocks on {target.mount.fs_type}: every snapshot is a full copy of the data",),
            )
        if not self._is_beside(volume.pool.id, identify(fd), target):
            return NotMine(
                reason=f"the store {shown(volume.pool.id)} is not on the file system of {shown(target.path)}",
                hint="set store in [backend.reflink] to a folder on the same file system",
            )
        excluded = set(volume.excluded)
        if target.mount.fs_type == "btrfs":
            seen = survey.survey(fd, extents=False)
            excluded.update(os.path.join(target.path, path) for path in seen.excluded)
        return replace(volume, excluded=tuple(sorted(excluded)))

    @staticmethod
    def _can_share(file_system: FileSystem, target: Target) -> bool:
        return file_system.reflinks or target.mount.fs_type == "bcachefs"

    def _is_beside(self, store: str, file_system: FileSystem, target: Target) -> bool:
        nearest = store if os.path.isdir(store) else os.path.dirname(store)
        if holder(nearest, self.mounter.mounts()).fs_type != target.mount.fs_type:
            return False
        fd = os.open(nearest, FOLDER_FLAGS)
        try:
            # Not st_dev: each btrfs subvolume has its own.
            return identify(fd).id == file_system.id
        finally:
            os.close(fd)

    def new_copy(self, source: Folder, target: Folder) -> FolderCopy:
        """Return a copy that shares blocks if the file system can."""
        return self._copy(source, target, "reflink" if can_clone(target) else "copy")

    def can_overlay(self, folder: Folder) -> bool:
        """Return whether the kernel would share the blocks of a file that a command changes.

        Else it would copy the whole file, and the command would fail in the middle where a clone says at once that
        there is no space for it.
        """
        return identify(folder.fd).reflinks

    def _copy(self, source: Folder, target: Folder, method: Method) -> SharedCopy:
        mount = holder(os.path.realpath(os.path.dirname(target.path)), self.mounter.mounts())
        plain = self.config.allow_plain_copy
        return SharedCopy(source, target, method=method, plain=plain, nocow=mount.fs_type == "btrfs")

    def clone_folder(self, source: str, target: str) -> None:
        """Clone a folder, whatever is in it; see `snapmgr.api.FolderCloning`. Nested subvolumes are refused."""
        clone_beside(source, target, lambda one, other: self._copy(one, other, "reflink"), self.remove_folder)

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:
        """Ask FIEMAP about every file if it must be exact: shared extents cost nothing."""
        usage = super().usage(ref)
        if not exact:
            return usage
        with self.snapshot(ref) as folder:
            try:
                with subfolder(DATA, folder.fd) as data:
                    return replace(usage, exclusive_bytes=survey.exclusive_bytes(data))
            except OSError as error:
                raise StorageError(f"cannot look through {shown(folder.path)}: {error.strerror}") from error

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make an XFS that shares blocks on a blank device; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self.runner, self.mounter, device, order)
        return provisioned(self, device, order, lambda: _make(maker))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        unmake(self.runner, self.mounter, device, order)


def _make(maker: StorageMaker) -> Provisioned:
    """Make it and mount it; the path is a folder in it, beside which the copies are kept."""
    maker.options({"file_system": ("xfs",)})
    maker.discard()
    maker.make_folder("xfs", maker.device, maker.order.size_bytes)
    return maker.made(maker.path, capacity_bytes=maker.free_bytes() * _SHARE)
