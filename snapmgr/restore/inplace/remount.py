"""Unmounts a file system everywhere, and mounts it again with the same options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.catalog.inplace import MountRecord
from snapmgr.contract.errors import CommandError, InUseError, SnapmgrError, StorageError
from snapmgr.system.mount import remove_point, unmount
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from snapmgr.catalog.inplace import OriginRecord
    from snapmgr.context import Context
    from snapmgr.contract.records import Mount

# Options that the kernel lists, and that mount(8) does not accept or sets by itself.
_LISTED_ONLY = frozenset({"rw", "ro", "seclabel", "idmapped"})


def mounts_of(ctx: Context, number: str) -> tuple[Mount, ...]:
    """Return all mounts of the file system on the device `number`, in the order in which they were made."""
    return tuple(mount for mount in ctx.mounter.mounts() if number and mount.device == number)


def describe(mounts: Iterable[Mount]) -> tuple[MountRecord, ...]:
    """Return the records that `mount_again` needs."""
    return tuple(
        MountRecord(
            point=mount.point,
            root=mount.root,
            fs_type=mount.fs_type,
            options=mount.options,
            super_options=mount.super_options,
        )
        for mount in mounts
    )


def lies_on(path: str, number: str) -> bool:
    """Whether `path` is on the file system of the device `number`."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    return f"{os.major(device)}:{os.minor(device)}" == number


def require_free(ctx: Context, number: str) -> None:
    """Raise InUseError if other file systems are mounted below these mounts, or other devices use the device."""
    everything, ours = ctx.mounter.mounts(), mounts_of(ctx, number)
    ids = {mount.id for mount in ours}
    below = [mount.point for mount in everything if mount.parent_id in ids and mount.device != number]
    if below:
        raise InUseError(
            f"something else is mounted below {ours[0].point}: {', '.join(below)}",
            hint=f"umount {' '.join(below)}, and mount it again afterwards",
        )
    try:
        above = sorted(os.listdir(f"/sys/dev/block/{number}/holders")) if number else []
    except OSError:
        above = []
    if above:
        raise InUseError(
            f"other devices use the volume: {', '.join(map(_device_name, above))} (LUKS, a partition, a RAID?)",
            hint="deactivate them first (umount, cryptsetup close, …): snapmgr cannot set them up again",
        )


def _device_name(name: str) -> str:
    try:
        return Path(f"/sys/class/block/{name}/dm/name").read_text(encoding="utf-8").strip()
    except OSError:
        return name


def unmount_all(mounts: Sequence[Mount]) -> None:
    """Unmount `mounts`, the newest first. Raises InUseError that names who uses one; the older ones stay mounted."""
    for mount in reversed(mounts):
        unmount(mount.point, mount_id=mount.id)


def mount_again(ctx: Context, part: OriginRecord) -> None:
    """Mount an origin again with the same options where it is not mounted now; warn about options that differ.

    Raises StorageError if a mount fails; the others are mounted anyway.
    """
    if not part.mounts:
        return
    failures: list[str] = []
    number = _number(part)
    for wanted in part.mounts:
        if _find(ctx, wanted, number) is None:
            try:
                _mount(ctx, part, wanted, number)
            except SnapmgrError as error:
                failures.append(error.message)
                continue
        mount = _find(ctx, wanted, number)
        if mount is None:
            failures.append(f"{wanted.point}: another file system is mounted there")
        elif (set(mount.options), set(mount.super_options)) != (set(wanted.options), set(wanted.super_options)):
            ctx.tell(
                f"warning: {wanted.point} was mounted with {_joined(wanted.options, wanted.super_options)}, and is now "
                f"mounted with {_joined(mount.options, mount.super_options)}"
            )
    if failures:
        raise StorageError(
            f"{part.origin} could not be mounted again: {'; '.join(failures)}",
            hint=f"mount {part.device} manually; then: snapmgr doctor --fix",
        )


def _number(part: OriginRecord) -> str:
    """Return the current number of the device."""
    try:
        device = os.stat(part.device).st_rdev
    except OSError as error:
        raise StorageError(
            f"the device {part.device} is unavailable: {error.strerror}",
            hint=f"activate it: lvchange -ay {part.origin}; then: snapmgr doctor --fix",
        ) from None
    return f"{os.major(device)}:{os.minor(device)}"


def _joined(options: Iterable[str], super_options: Iterable[str]) -> str:
    return ",".join(dict.fromkeys((*options, *super_options)))


def _find(ctx: Context, wanted: MountRecord, number: str) -> Mount | None:
    at = [mount for mount in ctx.mounter.mounts() if mount.point == wanted.point]
    # The last of several mounts at one point hides the others.
    return at[-1] if at and at[-1].device == number and at[-1].root == wanted.root else None


def _mount(ctx: Context, part: OriginRecord, wanted: MountRecord, number: str) -> None:
    if wanted.root == "/":
        _mount_whole(ctx, part.device, wanted, wanted.point)
        if "ro" in wanted.options and "ro" not in wanted.super_options:
            _set_options(ctx, wanted)
        return
    whole = next((mount for mount in mounts_of(ctx, number) if mount.root == "/"), None)
    if whole is not None:
        _bind(ctx, whole.point, wanted)
        return
    # A bind mount needs the file system's own root, which was mounted nowhere: mount it for a moment.
    point = ctx.config.scratch_dir / f"r{os.urandom(8).hex()}"
    point.mkdir(mode=0o700, parents=True)
    try:
        _mount_whole(ctx, part.device, wanted, str(point))
        try:
            _bind(ctx, str(point), wanted)
        finally:
            unmount(str(point))
    finally:
        remove_point(str(point))


def _mount_whole(ctx: Context, device: str, wanted: MountRecord, point: str) -> None:
    access = "ro" if "ro" in wanted.super_options else "rw"
    options = [access, *(one for one in (*wanted.options, *wanted.super_options) if one not in _LISTED_ONLY)]
    _run(ctx, ["mount", "-t", wanted.fs_type, "-o", ",".join(dict.fromkeys(options)), device, point])


def _bind(ctx: Context, whole: str, wanted: MountRecord) -> None:
    source = os.path.normpath(whole + wanted.root)
    if os.path.realpath(source) != source or not lies_in(source, whole):
        raise StorageError(f"{wanted.root} is a symlink in the snapshot: {wanted.point} is not mounted")
    _run(ctx, ["mount", "--bind", source, wanted.point])
    _set_options(ctx, wanted)


def _set_options(ctx: Context, wanted: MountRecord) -> None:
    _run(ctx, ["mount", "-o", ",".join(("remount", "bind", *wanted.options)), wanted.point])


def _run(ctx: Context, argv: Sequence[str]) -> None:
    try:
        ctx.runner.run(argv)
    except CommandError as error:
        raise StorageError(error.message, hint=error.hint) from error
