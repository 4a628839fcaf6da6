"""Lists the storages that are compared, with their missing requirements, backends and provisioners."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.bench.model import Stack
from snapmgr.config.plugins import list_plugins, make_backend
from snapmgr.contract.abilities import FolderCloning, Provisioner
from snapmgr.contract.errors import MissingRequirementError, SnapmgrError
from snapmgr.contract.records import NotMine, Reason
from snapmgr.system.blockdev import find_target
from snapmgr.system.command import CommandRunner, find_program
from snapmgr.system.mount import KernelMounter
from snapmgr.system.provisioning import StorageMaker, provisioned, unmake

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from snapmgr.bench.model import Parameters
    from snapmgr.contract.backend import Backend, Mounter, Runner
    from snapmgr.contract.records import Provisioned, ProvisionOrder

_XFS, _EXT4, _THIN = {"file_system": "xfs"}, {"file_system": "ext4"}, {"thin": "yes"}

# A share of the volume, as backups have it, is more than /var/tmp has where disks are large. Journals are nearly empty
# after the freeze that a snapshot comes with.
_SCRATCH_BYTES = 128 << 20

STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack(name="btrfs", title="btrfs", label="btrfs", backend="btrfs"),
        Stack(
            name="btrfs-nocow",
            title="btrfs without copy-on-write for data (chattr +C)",
            label="btrfs, nodatacow",
            backend="btrfs",
            options={"nocow": "yes"},
        ),
        Stack(
            name="xfs-reflink",
            title="XFS, copies that share blocks (reflink)",
            label="XFS, reflink copies",
            backend="reflink",
            options=_XFS,
        ),
        Stack(
            name="lvm+ext4",
            title="ext4 on LVM, classic snapshots",
            label="LVM classic, ext4",
            backend="lvm",
            options=_EXT4,
        ),
        Stack(
            name="lvm+xfs", title="XFS on LVM, classic snapshots", label="LVM classic, XFS", backend="lvm", options=_XFS
        ),
        Stack(
            name="lvm-thin+ext4",
            title="ext4 on an LVM thin pool",
            label="LVM thin, ext4",
            backend="lvm",
            options=_EXT4 | _THIN,
        ),
        Stack(
            name="lvm-thin+xfs",
            title="XFS on an LVM thin pool",
            label="LVM thin, XFS",
            backend="lvm",
            options=_XFS | _THIN,
        ),
        Stack(
            name="lvm-thin-prefilled+ext4",
            title="ext4 on an LVM thin volume that was written once",
            label="LVM thin, written, ext4",
            backend="lvm",
            options=_EXT4 | _THIN | {"prefilled": "yes"},
        ),
        Stack(
            name="lvm-thin-prefilled+xfs",
            title="XFS on an LVM thin volume that was written once",
            label="LVM thin, written, XFS",
            backend="lvm",
            options=_XFS | _THIN | {"prefilled": "yes"},
        ),
        Stack(
            name="juicefs",
            title="JuiceFS with its objects on the device",
            label="JuiceFS",
            backend="juicefs",
            # Caches of private mounts disappear with the device, however this process ends.
            settings={"cache_root": "{point}/cache"},
        ),
        Stack(name="ext4", title="ext4, without snapshots", label="ext4, no snapshots", backend=None, options=_EXT4),
        Stack(
            name="ext4-dioread-lock",
            title="ext4 mounted with dioread_lock, without snapshots",
            label="ext4, dioread_lock",
            backend=None,
            options=_EXT4 | {"mount_options": "dioread_lock"},
        ),
        Stack(
            name="ext4-dioread-nolock",
            title="ext4 mounted with dioread_nolock, without snapshots",
            label="ext4, dioread_nolock",
            backend=None,
            options=_EXT4 | {"mount_options": "dioread_nolock"},
        ),
        Stack(name="xfs", title="XFS, without snapshots", label="XFS, no snapshots", backend=None, options=_XFS),
    )
}
"""Stacks that come with snapmgr by their name for ``--stacks``, in the order of lists and reports; also those whose
backend cannot be loaded here. `snapmgr.bench.storage.contributed.all_stacks` adds those of plugins."""

_PACKAGES = {"mkfs.ext4": "e2fsprogs", "chattr": "e2fsprogs", "thin_check": "thin-provisioning-tools"}


def missing_requirements(stack: Stack) -> tuple[Reason, ...]:
    """Return the missing requirements of a stack on this machine; empty if it can be made here. Never raises.

    Kernel modules that are needed are loaded meanwhile.
    """
    reasons: list[Reason] = []
    if os.geteuid() != 0:
        reasons.append(Reason(what="making and mounting file systems needs root", hint="run snapmgr as root"))
    try:
        backend = backend_of(stack, {}, CommandRunner(), KernelMounter())
    except SnapmgrError as error:
        return (*reasons, Reason(what=error.message, hint=error.hint or ""))
    # Load the modules first: the backend may check for them.
    fs_reasons = _missing_file_system(_file_system(stack))
    if backend is not None:
        reasons += backend.missing()
        if not isinstance(backend, Provisioner):
            reasons.append(Reason(what=f"the backend {stack.backend} cannot make its storage on a device", hint=""))
    known = {reason.what for reason in reasons}
    reasons += [reason for reason in fs_reasons if reason.what not in known]
    reasons += _missing_programs(stack)
    return tuple(dict.fromkeys(reasons))


def _file_system(stack: Stack) -> str | None:
    fixed = {"btrfs": "btrfs", "juicefs": "ext4"}
    return fixed.get(stack.backend or "", stack.options.get("file_system"))


def _missing_file_system(fs_type: str | None) -> list[Reason]:
    if fs_type is None or _kernel_knows(fs_type):
        return []
    with suppress(SnapmgrError):
        CommandRunner().run(["modprobe", "--quiet", fs_type], ok=(0, 1))
    if _kernel_knows(fs_type):
        return []
    return [Reason(what=f"the kernel has no {fs_type}", hint=f"modprobe {fs_type}, or a kernel that has it")]


def _kernel_knows(fs_type: str) -> bool:
    lines = Path("/proc/filesystems").read_text(encoding="ascii").splitlines()
    return any(line.split()[-1] == fs_type for line in lines)


def _missing_programs(stack: Stack) -> list[Reason]:
    fs_type = _file_system(stack)
    programs = [f"mkfs.{fs_type}"] if fs_type is not None else []
    if fs_type == "btrfs":
        programs += ["btrfs", "chattr"]
    if stack.backend == "lvm":
        programs += ["pvcreate", "vgcreate", *(["thin_check"] if "thin" in stack.options else [])]
    reasons = []
    for program in programs:
        try:
            find_program(program)
        except MissingRequirementError as error:
            package = _PACKAGES.get(program)
            reasons.append(
                Reason(what=error.message, hint=f"apt-get install {package}" if package else error.hint or "")
            )
    return reasons


def backend_table(stack: Stack, parameters: Parameters, *, point: str | None = None) -> dict[str, Any]:
    """Return the configuration that a stack's backend gets; `point` is where its storage is, once it is made.

    A classic LVM snapshot gets all the free space in the group, divided by `parameters.extra["snapshots"]`, the number
    that exist at the same time. An attachment may write "scratch_bytes", by default enough to replay a journal.
    """
    if not stack.classic_lvm:
        return {} if point is None else {key: text.replace("{point}", point) for key, text in stack.settings.items()}
    at_once = max(int(parameters.extra.get("snapshots", 1)), 1)
    # The origin is three quarters of the group; a little is for the table itself and for rounding to extents.
    return {
        "cow_size": f"{33.0 / at_once:.2f}%",
        "scratch_size": f"{-(-int(parameters.extra.get('scratch_bytes', _SCRATCH_BYTES)) >> 20)}M",
    }


def backend_of(stack: Stack, table: Mapping[str, Any], runner: Runner, mounter: Mounter) -> Backend | None:
    """Return the backend that takes a stack's snapshots; None for a control. `table` is its configuration.

    Raises what `snapmgr.config.plugins.make_backend` raises.
    """
    return make_backend(stack.backend, table, runner, mounter) if stack.backend is not None else None


def provisioner_of(stack: Stack, backend: Backend | None, runner: Runner, mounter: Mounter) -> Provisioner:
    """Return the provisioner of a stack's storage. Raises MissingRequirementError if its backend has none."""
    if backend is None:
        return Controls(runner, mounter)
    if not isinstance(backend, Provisioner):
        raise MissingRequirementError(f"the backend {stack.backend} cannot make its storage on a device")
    return backend


def cloning_of(own: Backend, path: str, runner: Runner, mounter: Mounter) -> FolderCloning | None:
    """Return the means to clone a folder at `path`; None if no installed backend can.

    Args:
        own: the backend of the stack's snapshots. On LVM it takes snapshots of whole volumes, so another backend clones
            the folders of btrfs and XFS, as for ``snapmgr prepare``.
        path: a folder in the storage.
        runner: for programs.
        mounter: for private mounts.
    """
    target = find_target(path, runner=runner)
    for backend in (own, *_others(own, runner, mounter)):
        if not isinstance(backend, FolderCloning):
            continue
        # A backend without its program raises here.
        with suppress(SnapmgrError):
            if not isinstance(backend.locate(target), NotMine) and not backend.missing():
                return backend
    return None


def _others(own: Backend, runner: Runner, mounter: Mounter) -> Iterator[Backend]:
    for plugin in list_plugins():
        if plugin.backend is not None and plugin.name != own.name:
            with suppress(SnapmgrError):
                yield make_backend(plugin.name, {}, runner, mounter)


# A full file system would distort the results.
_SHARE = 0.9


class Controls:
    """A `snapmgr.api.Provisioner` for ext4 and XFS; options: ``file_system``, ``mount_options`` (with commas)."""

    def __init__(self, runner: Runner, mounter: Mounter) -> None:
        self._runner = runner
        self._mounter = mounter

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make the file system and mount it; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self._runner, self._mounter, device, order)
        return provisioned(self, device, order, lambda: _make(maker))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Remove it; see `snapmgr.api.Provisioner`."""
        unmake(self._runner, self._mounter, device, order)


def _make(maker: StorageMaker) -> Provisioned:
    fs_type = maker.options({"file_system": ("ext4", "xfs")}).get("file_system", "ext4")
    maker.discard()
    maker.make_folder(fs_type, maker.device, maker.order.size_bytes)
    return maker.made(maker.path, capacity_bytes=maker.free_bytes() * _SHARE)
