"""The storages that are compared, and what this machine lacks for each."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.bench.model import Stack
from snapmgr.bench.storage.controls import Controls
from snapmgr.config.plugins import make_backend
from snapmgr.contract.abilities import Provisioner
from snapmgr.contract.errors import MissingRequirementError, SnapmgrError
from snapmgr.contract.records import Reason
from snapmgr.system.command import CommandRunner, find_program
from snapmgr.system.mount import KernelMounter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.bench.model import Parameters
    from snapmgr.contract.backend import Backend, Mounter, Runner

_XFS, _EXT4, _THIN = {"file_system": "xfs"}, {"file_system": "ext4"}, {"thin": "yes"}

# A share of the volume, as backups have it, is more than /var/tmp has where disks are large. Journals are nearly empty
# after the freeze that a snapshot comes with.
_SCRATCH_BYTES = 128 << 20

STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack(name="btrfs", title="btrfs", backend="btrfs"),
        Stack(
            name="btrfs-nocow",
            title="btrfs without copy-on-write for data (chattr +C)",
            backend="btrfs",
            options={"nocow": "yes"},
        ),
        Stack(name="xfs-reflink", title="XFS, copies that share blocks (reflink)", backend="reflink", options=_XFS),
        Stack(name="lvm+ext4", title="ext4 on LVM, classic snapshots", backend="lvm", options=_EXT4),
        Stack(name="lvm+xfs", title="XFS on LVM, classic snapshots", backend="lvm", options=_XFS),
        Stack(name="lvm-thin+ext4", title="ext4 on an LVM thin pool", backend="lvm", options=_EXT4 | _THIN),
        Stack(name="lvm-thin+xfs", title="XFS on an LVM thin pool", backend="lvm", options=_XFS | _THIN),
        Stack(
            name="lvm-thin-prefilled+ext4",
            title="ext4 on an LVM thin volume that was written once",
            backend="lvm",
            options=_EXT4 | _THIN | {"prefilled": "yes"},
        ),
        Stack(
            name="lvm-thin-prefilled+xfs",
            title="XFS on an LVM thin volume that was written once",
            backend="lvm",
            options=_XFS | _THIN | {"prefilled": "yes"},
        ),
        Stack(name="juicefs", title="JuiceFS, its objects on the device", backend="juicefs"),
        Stack(name="ext4", title="ext4, without snapshots", backend=None, options=_EXT4),
        Stack(
            name="ext4-dioread-lock",
            title="ext4 mounted with dioread_lock, without snapshots",
            backend=None,
            options=_EXT4 | {"mount_options": "dioread_lock"},
        ),
        Stack(
            name="ext4-dioread-nolock",
            title="ext4 mounted with dioread_nolock, without snapshots",
            backend=None,
            options=_EXT4 | {"mount_options": "dioread_nolock"},
        ),
        Stack(name="xfs", title="XFS, without snapshots", backend=None, options=_XFS),
    )
}
"""By the name that ``--stacks`` takes, in the order that they are told in."""

_PACKAGES = {"mkfs.ext4": "e2fsprogs", "chattr": "e2fsprogs", "thin_check": "thin-provisioning-tools"}


def lacking(stack: Stack) -> tuple[Reason, ...]:
    """Return all that this machine lacks for a stack; empty if it can be made here. Never raises.

    Kernel modules that are needed are loaded meanwhile.
    """
    reasons: list[Reason] = []
    if os.geteuid() != 0:
        reasons.append(Reason(what="a file system is made and mounted as root only", hint="run snapmgr as root"))
    if stack.backend is not None:
        try:
            backend = make_backend(stack.backend, {}, CommandRunner(), KernelMounter())
        except SnapmgrError as error:
            return (*reasons, Reason(what=error.message, hint=error.hint or ""))
        # Loaded before it is asked: it may look at what is there.
        fs_reasons = _lacking_file_system(_file_system(stack))
        reasons += backend.missing()
        if not isinstance(backend, Provisioner):
            reasons.append(Reason(what=f"the backend {stack.backend} cannot make its storage on a device", hint=""))
    else:
        fs_reasons = _lacking_file_system(_file_system(stack))
    known = {reason.what for reason in reasons}
    reasons += [reason for reason in fs_reasons if reason.what not in known]
    reasons += _lacking_programs(stack)
    return tuple(dict.fromkeys(reasons))


def _file_system(stack: Stack) -> str | None:
    fixed = {"btrfs": "btrfs", "juicefs": "ext4"}
    return fixed.get(stack.backend or "", stack.options.get("file_system"))


def _lacking_file_system(fs_type: str | None) -> list[Reason]:
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


def _lacking_programs(stack: Stack) -> list[Reason]:
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

    A classic LVM snapshot gets all the room there is in the group, divided if `parameters.extra` says that so many
    ("snapshots") are there at once. An attachment may write "scratch_bytes": by default what a journal's replay takes.
    """
    if stack.backend == "juicefs" and point is not None:
        # Caches of private mounts go with the device, whatever ends this process.
        return {"cache_root": os.path.join(point, "cache")}
    if stack.backend != "lvm" or "thin" in stack.options:
        return {}
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
    """Return what makes a stack's storage. Raises MissingRequirementError if its backend cannot."""
    if backend is None:
        return Controls(runner, mounter)
    if not isinstance(backend, Provisioner):
        raise MissingRequirementError(f"the backend {stack.backend} cannot make its storage on a device")
    return backend
