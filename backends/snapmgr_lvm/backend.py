"""Provides the LVM backend: docs/reference/backends/lvm.md lists its guarantees, `snapmgr.api.Backend` is the
contract."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Literal

from snapmgr.api import (
    API_VERSION,
    AlteredError,
    Attachment,
    Capabilities,
    CommandError,
    Intent,
    InUseError,
    MissingRequirementError,
    NotMine,
    Reason,
    StorageError,
    StorageMaker,
    Usage,
    provisioned,
)
from snapmgr.api.kernel import may_mount
from snapmgr_lvm import (
    arming,
    dm,
    gauges,
    inventory,
    locating,
    luks,
    marks,
    orphans,
    provisioning,
    removal,
    sizing,
)
from snapmgr_lvm.armed import LvmArmed, Member, open_origin
from snapmgr_lvm.config import LvmConfig
from snapmgr_lvm.report import change, read_group
from snapmgr_lvm.revert import Reverting
from snapmgr_lvm.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from snapmgr.api import (
        Armed,
        AttachRecord,
        Found,
        Gauge,
        Mounter,
        Pool,
        Provisioned,
        ProvisionOrder,
        Reservoir,
        Runner,
        SnapshotRef,
        Target,
        Volume,
    )
    from snapmgr_lvm.report import Group, LogicalVolume
    from snapmgr_lvm.sizing import CowPlan

_PROGRAMS = ("lvs", "lvcreate", "lvremove", "lvchange", "vgck", "dmsetup", "blkid")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# XFS refuses a second file system with the same UUID, and a snapshot has its origin's.
_OPTIONS = {"xfs": ("nouuid",)}


class LvmBackend(Reverting):
    """Snapshots of logical volumes; see `snapmgr.api.Backend`."""

    name: ClassVar[str] = "lvm"
    api_version: ClassVar[int] = API_VERSION
    Config: ClassVar[type[LvmConfig]] = LvmConfig

    def __init__(self, config: LvmConfig, runner: Runner, mounter: Mounter) -> None:
        self._config = config
        self._runner = runner
        self._mounter = mounter
        self._scratch = Scratch(config, runner, mounter)

    def missing(self) -> tuple[Reason, ...]:
        """Return the missing requirements: LVM's programs, device-mapper in the kernel, root."""
        reasons = []
        absent = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
        if absent:
            reasons.append(Reason(what=f"not installed: {', '.join(absent)}", hint="apt-get install lvm2"))
        if not dm.has_device_mapper():
            reasons.append(Reason(what="the kernel has no device-mapper", hint="modprobe dm-mod, or another kernel"))
        if not may_mount():
            reasons.append(Reason(what="LVM needs root (CAP_SYS_ADMIN)", hint="run snapmgr as root"))
        return tuple(reasons)

    def locate(self, target: Target) -> Volume | NotMine:
        """Find the logical volume that holds `target`; see `snapmgr.api.Backend.locate`."""
        return locating.locate(self._runner, self._config, target)

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:
        """One volume in one instant. A thin snapshot survives its origin; a classic one is removed with it."""
        thin = all(kind == "thin" for _, _, kind in self._read_origins(volumes))
        return Capabilities(atomicity="volume", clone="native" if thin else "scratch", survives_origin=thin)

    def headroom(self, volume: Volume) -> tuple[Reservoir, ...]:
        """Return the thin pool's data and metadata, or the group's free space, which holds CoW tables."""
        ((group, origin, kind),) = self._read_origins((volume,))
        plan = None if kind == "thin" else self._plan_cow(group, origin)
        return gauges.of_volume(group, origin, cow_bytes=plan.size_bytes if plan is not None else None)

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """See `snapmgr.api.CapacityReporting.gauges`."""
        return tuple(gauge for pool in pools for gauge in gauges.of_group(self._read(pool)))

    def auto_extend(self, ref: SnapshotRef) -> str | None:
        """Enlarge a classic snapshot's CoW table; see `snapmgr.api.AutoExtending.auto_extend`."""
        return gauges.auto_extend(self._config, self._runner, ref)

    def _plan_cow(self, group: Group, origin: LogicalVolume) -> CowPlan:
        writes = sizing.measure_writes(origin.device)
        return sizing.plan_cow(self._config, group, origin, writes=writes, now=datetime.now(UTC))

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> Armed:
        """Check names, room, the groups' health and the origins, and flush them once."""
        marks.check_snapshot_id(snapshot_id)
        if not volumes or len({volume.id for volume in volumes}) < len(volumes):
            raise StorageError("a snapshot needs one or more logical volumes, each once")
        start = time.monotonic()
        origins = list(self._read_origins(volumes))
        read_s = (time.monotonic() - start) / len({volume.pool.id for volume in volumes})
        with ExitStack() as stack:
            members: list[Member] = []
            promised: Counter[str] = Counter()
            for number, (volume, (group, origin, kind)) in enumerate(zip(volumes, origins, strict=True)):
                name = marks.snapshot_name(snapshot_id, number)
                if group.by_name(name) is not None:
                    raise StorageError(
                        f"there is a logical volume {group.name}/{name} already", hint="`snapmgr doctor` shows it"
                    )
                arming.check_origin(group, origin)
                cow: CowPlan | None = None
                if kind == "thin":
                    arming.check_pool(self._config, group, origin)
                else:
                    cow = self._plan_cow(group, origin)
                    sizing.require_room(group, origin, cow, promised_bytes=promised[group.uuid])
                    promised[group.uuid] += cow.size_bytes
                fd = open_origin(volume.pool, volume.path, origin.device, origin.name)
                stack.callback(os.close, fd)
                argv = arming.command(group, origin, name=name, snapshot_id=snapshot_id, cow=cow)
                about = cow.about if cow is not None else ""
                intent = Intent(pool=volume.pool, volume_id=origin.uuid, name=name, about=about)
                members.append(Member(intent=intent, path=volume.path, fd=fd, argv=argv))
            for group in {group.uuid: group for group, _, _ in origins}.values():
                arming.check_group(group)
                self._check_metadata(group)
            armed = LvmArmed(self._runner, snapshot_id, tuple(members), read_s, stack.pop_all())
        try:
            armed.sync()
        except BaseException:
            armed.__exit__(None, None, None)
            raise
        return armed

    def _check_metadata(self, group: Group) -> None:
        try:
            self._runner.run(["vgck", group.name])
        except CommandError as error:
            raise StorageError(
                f"the metadata of the volume group {group.name} are not consistent: {error.message}",
                hint="see vgck(8): --updatemetadata",
            ) from error

    def _read_origins(self, volumes: tuple[Volume, ...]) -> Iterator[tuple[Group, LogicalVolume, locating.Kind]]:
        groups: dict[str, Group] = {}
        for volume in volumes:
            if volume.pool.id not in groups:
                groups[volume.pool.id] = self._read(volume.pool)
            group = groups[volume.pool.id]
            origin = group.by_uuid(volume.id)
            if origin is None:
                raise StorageError(f"the logical volume of {volume.path} ({volume.id}) is not in {group.name} any more")
            kind = locating.choose_kind(self._config, origin)
            if isinstance(kind, NotMine):
                raise StorageError(kind.reason, hint=kind.hint)
            yield group, origin, kind

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """Check that the snapshots are read-only and have the right origins, and mark them as settled."""
        deadline = time.monotonic() + timeout_s
        for ref in dict.fromkeys(refs):
            # LVM and the thin pool write their metadata before lvcreate returns.
            group, volume = self._snapshot(ref)
            if volume.writable:
                raise StorageError(f"the snapshot {group.name}/{volume.name} is not read-only")
            if marks.value(volume, "state") != "settled":
                left_s = max(deadline - time.monotonic(), 0.1)
                tags = ("--deltag", marks.state_tag("made"), "--addtag", marks.state_tag("settled"))
                change(self._runner, ["lvchange", "--yes", *tags, f"{group.name}/{volume.name}"], timeout_s=left_s)

    def inventory(
        self,
        pools: tuple[Pool, ...],
        *,
        notes: bool = True,  # noqa: ARG002 - they come with LVM's report
    ) -> tuple[Found, ...]:
        """Return everything of ours in `pools`; see `snapmgr_lvm.marks` for the marks."""
        everything: list[Found] = []
        for pool in pools:
            devices = orphans.candidates(pool)
            group = self._read(pool)
            everything += (*inventory.read(group), *self._scratch.found(group), *orphans.found(group, devices))
        return tuple(everything)

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Store `note` in the snapshot's tags, in one change of LVM's metadata."""
        tags = marks.note_tags(note)
        group, volume = self._snapshot(ref)
        old = marks.removing(tag for tag in marks.old_note_tags(volume.tags) if tag not in tags)
        new = marks.adding(tag for tag in tags if tag not in volume.tags)
        if not old and not new:
            return
        room = sum(map(len, new))
        if room * 2 > group.metadata_free_bytes:
            raise StorageError(
                f"no room for the note of {ref.name}: {group.metadata_free_bytes} bytes are left in the metadata "
                f"area of {group.name}",
                hint="prune snapshots; a group made with a larger --metadatasize holds more",
            )
        change(self._runner, ["lvchange", "--yes", *old, *new, f"{group.name}/{volume.name}"])

    def attach(self, record: AttachRecord) -> Attachment:
        """Make a writable clone of a thin snapshot, or put an overlay on a classic one; both replay the journal."""
        name = marks.attachment_name(record.id)
        group, volume = self._snapshot(record.ref)
        if volume.writable:
            raise AlteredError(
                f"the snapshot {group.name}/{volume.name} is not to be trusted: it was made writable by hand",
                hint="delete it if it is not needed",
            )
        if volume.is_classic_snapshot:
            device = self._scratch.attach(record, volume, group)
        else:
            device = self._clone(group, volume, record, name)
        fs_type = self._fs_type(device)
        if fs_type == luks.FS_TYPE:
            device = luks.open_container(device, record.id, self._config.luks_key_file)
            fs_type = self._fs_type(device)
        return Attachment(device=device, fs_type=fs_type, options=_OPTIONS.get(fs_type, ()))

    def _fs_type(self, device: str) -> str:
        return self._runner.run(["blkid", "-p", "-s", "TYPE", "-o", "value", device]).stdout.strip()

    def _clone(self, group: Group, volume: LogicalVolume, record: AttachRecord, name: str) -> str:
        if group.by_name(name) is not None:
            raise StorageError(f"there is a logical volume {group.name}/{name} already", hint="snapmgr doctor")
        tags = marks.attachment_tags(record.id, record.ref.snapshot_id, volume.uuid)
        # The flag keeps it inactive at the next boot; this time it is ignored.
        active = ("--setactivationskip", "y", "--ignoreactivationskip", "--activate", "y")
        change(
            self._runner,
            [
                "lvcreate",
                "--yes",
                "--snapshot",
                "--permission",
                "rw",
                *active,
                *marks.adding(tags),
                "--name",
                name,
                f"{group.name}/{volume.name}",
            ],
        )
        # lvcreate made it under this name, or failed; its node exists when lvcreate returns.
        return f"/dev/mapper/{removal.device_name(group, name)}"

    def detach(self, record: AttachRecord) -> None:
        """Remove the clone or the overlay that `attach` made for `record`, if it belongs to exactly that snapshot."""
        luks.close_container(self._mounter, record.id)
        self._scratch.detach(record)
        group = self._read(record.ref.pool)
        for volume in removal.attached_clones(group, record.ref.native_id):
            if marks.value(volume, "attachment") == record.id:
                removal.remove(self._runner, group, volume)

    def attachment_problem(self, record: AttachRecord) -> Reason | None:
        """See `snapmgr.api.ScratchAttaching.attachment_problem`."""
        _, volume = self._snapshot(record.ref)
        return self._scratch.problem(record) if volume.is_classic_snapshot else None

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:  # noqa: ARG002 - LVM frees it immediately
        """Remove the snapshot by its UUID, also if it was renamed."""
        group = self._read(ref.pool)
        origin, volume = group.by_uuid(ref.volume_id), group.by_uuid(ref.native_id)
        if origin is not None and origin.suspended:
            # An earlier removal was interrupted; a running one would hold the group's lock, under which we just read.
            removal.resume(self._runner, group, origin)
        if volume is None:
            if group.by_name(ref.name) is not None:
                raise StorageError(
                    f"{group.name}/{ref.name} is another volume than the snapshot that snapmgr made: it is left alone",
                    hint=f"if it is not needed: lvremove {group.name}/{ref.name}",
                )
            return
        if marks.value(volume, "id") != ref.snapshot_id:
            raise StorageError(
                f"{group.name}/{volume.name} does not bear the mark of the snapshot {ref.snapshot_id} (any more)",
                hint=f"if it is not needed: lvremove {group.name}/{volume.name}",
            )
        clones = [clone.name for clone in removal.attached_clones(group, volume.uuid)]
        clones += map(marks.attachment_name, self._scratch.users(volume.uuid))
        if clones:
            raise InUseError(
                f"the snapshot {group.name}/{volume.name} is attached as {clones[0]}",
                hint="`snapmgr umount` it first",
            )
        removal.remove(self._runner, group, volume)

    def repair(self, found: Found) -> None:
        """Resume a suspended origin, or remove a half-made volume."""
        devices = orphans.candidates(found.pool)
        group = self._read(found.pool)
        if found.record_id is not None:
            self._scratch.clear_debris(group, found.record_id)
            return
        if found.why == orphans.WHY:
            orphans.remove(group, devices, found.name)
            return
        for now in inventory.read(group):
            volume = group.by_name(now.name)
            if now.kind != "debris" or now.name != found.name or volume is None:
                continue
            if now.why == inventory.SUSPENDED:
                removal.resume(self._runner, group, volume)
            elif now.ref is not None:
                raise InUseError(
                    f"{group.name}/{volume.name}: {now.why}", hint="it may hold somebody's work: delete it by hand"
                )
            else:
                removal.remove(self._runner, group, volume)

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:
        """Return the bytes in a classic snapshot's CoW table; if exact, the exclusive blocks of a thin one."""
        group, volume = self._snapshot(ref)
        return gauges.usage(self._runner, group, volume, exact=exact)

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make this storage on a blank device; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self._runner, self._mounter, device, order)
        return provisioned(self, device, order, lambda: provisioning.make(maker))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        provisioning.unprovision(self._runner, self._mounter, self._scratch, device, order)

    def _read(self, pool: Pool) -> Group:
        if not may_mount():
            raise MissingRequirementError("LVM needs root (CAP_SYS_ADMIN)", hint="run snapmgr as root")
        return read_group(self._runner, pool)

    def _snapshot(self, ref: SnapshotRef) -> tuple[Group, LogicalVolume]:
        group = self._read(ref.pool)
        return group, inventory.require_snapshot(group, ref)
