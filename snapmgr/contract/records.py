"""The records that cross the backend interface; plugins import them from `snapmgr.api`.

Every record is a frozen, keyword-only dataclass; units are in the names. ``*_ns`` are nanoseconds of CLOCK_MONOTONIC,
which all processes of a machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from snapmgr.contract.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One thing that is lacking on this machine, and what to do about it."""

    what: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class BlockDevice:
    """A block device and the devices below it (a partition's disk, an LV's PVs, a loop device's none)."""

    name: str
    """Kernel name: "sda1", "dm-3", "loop0"."""
    path: str
    """Device node: "/dev/sda1"."""
    number: str
    """Major and minor: "8:1"."""
    kind: str
    """"disk", "part", "loop", "lvm", "crypt", "raid", or the kernel's name for anything else."""
    size_bytes: int
    fs_type: str | None = None
    fs_uuid: str | None = None
    dm_name: str | None = None
    dm_uuid: str | None = None
    below: tuple[BlockDevice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of /proc/self/mountinfo (proc(5)), octal escapes decoded."""

    id: int
    parent_id: int
    device: str
    """Major and minor of the mounted file system: "8:1", "0:39"."""
    root: str
    """The folder of the file system that is mounted; for btrfs the path from the top level, as in "/@mysql"."""
    point: str
    fs_type: str
    source: str
    options: tuple[str, ...] = ()
    super_options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be snapshotted: an existing directory, resolved, with the storage under it."""

    path: str
    """Absolute, symlinks resolved."""
    mount: Mount
    """The mount that holds `path`."""
    devices: tuple[BlockDevice, ...] = ()
    """The device or devices (btrfs may have several) that hold the file system; empty for network file systems."""
    submounts: tuple[Mount, ...] = ()
    """Other mounts below `path`: a snapshot of the file system shows empty folders there."""


PoolKey = tuple[str, str]
"""`Pool.key`: backend and id."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What holds snapshots: a btrfs file system, a volume group, a folder of copies. `inventory` reads it whole."""

    backend: str
    id: str
    """The storage's own id (file system UUID, VG UUID, …); for a folder its path."""
    hint: str
    """Where it was last seen (a mount point, a device); only to find it faster and to name it to people."""

    @property
    def key(self) -> PoolKey:
        """What a pool is known by, wherever it is seen."""
        return (self.backend, self.id)

    @property
    def title(self) -> str:
        """Its name for people."""
        return f"{self.backend} {self.hint}"


@dataclass(frozen=True, kw_only=True)
class Volume:
    """The unit that one snapshot covers: a subvolume, a logical volume, a directory tree."""

    backend: str
    id: str
    """The storage's own id of the origin: subvolume UUID, LV UUID, … never a name."""
    pool: Pool
    path: str
    """Where the origin is reachable now."""
    subpath: str
    """Path of the target inside the volume, without a leading slash; "" when the target is the volume."""
    excluded: tuple[str, ...] = ()
    """Absolute paths at or below `path` that a snapshot would *not* hold: nested subvolumes and mounts."""
    warnings: tuple[str, ...] = ()
    label: str = ""
    """For people, where the id tells them little: "vg0/db (classic snapshot)"."""

    @property
    def shown(self) -> str:
        """What people are shown it as."""
        return self.label or self.id


@dataclass(frozen=True, kw_only=True)
class NotMine:
    """Why a backend cannot snapshot a target."""

    reason: str
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can promise for given volumes."""

    atomicity: Literal["file", "volume"]
    """"volume": all of one volume in one instant. "file": each file for itself; refused for live servers."""
    clone: Literal["native", "scratch", "none"]
    """How `attach(writable=True)` makes its copy: in the storage, on scratch space, or not at all."""
    survives_origin: bool
    """Whether a snapshot stays usable after its origin was deleted."""


@dataclass(frozen=True, kw_only=True)
class Reservoir:
    """Something that can fill up, and what happens then."""

    name: str
    size_bytes: int
    used_bytes: int
    when_full: Literal["snapshot_lost", "origin_errors", "no_snapshots"]
    wanted_bytes: int = 0
    """What the next snapshot takes of it at once."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRef:
    """A snapshot: our id together with the storage's own, which alone is believed."""

    backend: str
    snapshot_id: str
    pool: Pool
    volume_id: str
    """The origin's id (`Volume.id`)."""
    name: str
    """Its name in the pool: where to look first."""
    native_id: str
    """The storage's own id of the snapshot (subvolume UUID, LV UUID, …). What has another id is never touched."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What does not change when the pool is seen elsewhere or the snapshot is renamed."""
        return (self.backend, self.pool.id, self.native_id)


@dataclass(frozen=True, kw_only=True)
class Gauge(Reservoir):
    """How full a reservoir of a pool is, as `CapacityReporting.gauges` read it."""

    pool: Pool
    ref: SnapshotRef | None = None
    """The snapshot whose own room it is (a CoW table); None for what all share."""
    volume_ids: tuple[str, ...] = ()
    """Of what is shared: the origins whose snapshots it concerns; () for all in the pool."""
    valid: bool = True
    """False: it ran full. `ref` is lost; without one, what shares it cannot be written any more."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What `fire` will make; written to disk before it is made, so that a crash leaves nothing unknown."""

    pool: Pool
    volume_id: str
    name: str
    about: str = ""
    """What was decided about it, and why, for people: the size of its CoW table."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One snapshot that exists now, with the storage call's start and finish (CLOCK_MONOTONIC)."""

    ref: SnapshotRef
    start_ns: int
    finish_ns: int


class FireError(StorageError):
    """`Armed.fire` failed; `shots` are the members that exist nevertheless."""

    def __init__(self, message: str, *, hint: str | None = None, shots: tuple[Shot, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.shots = shots


@dataclass(frozen=True, kw_only=True)
class AttachRecord:
    """An attachment's record; it is on disk before `attach` is called, so that `detach` works after any crash."""

    id: str
    """16 hex digits; names whatever the backend makes for this attachment."""
    ref: SnapshotRef
    writable: bool
    boot_id: str
    """/proc/sys/kernel/random/boot_id at attach time: mounts and loop devices of another boot are gone."""


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """What `attach` made reachable: a directory, or a device that the core mounts."""

    directory: str | None = None
    device: str | None = None
    fs_type: str | None = None
    options: tuple[str, ...] = ()
    """Mount options; the core adds nosuid, nodev, and "ro" where asked."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Something of ours in a pool, as `inventory` saw it."""

    kind: Literal["snapshot", "attachment", "debris"]
    """"debris": begun and not finished, for `repair`."""
    pool: Pool
    name: str
    snapshot_id: str | None = None
    ref: SnapshotRef | None = None
    """Set for every snapshot."""
    record_id: str | None = None
    """`AttachRecord.id`, for attachments."""
    note: bytes | None = None
    """What `annotate` stored last."""
    why: str = ""
    """For debris: what is wrong, for people."""
    cure: str = "removes it"
    """For debris: what `Backend.repair` does about it, for people."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a snapshot costs."""

    exclusive_bytes: int | None
    """Bytes that its deletion would free; None where that is not known cheaply."""
    valid: bool = True
    """False: the storage lost it (an overflowed CoW table)."""


@dataclass(frozen=True, kw_only=True)
class RevertPlan:
    """What putting an origin back to one of its snapshots means, as `Revertible.revert_plan` saw it."""

    origin: str
    """Name of the origin, for people: "vg/mysql"."""
    device: str
    """Its device node, which keeps its name: "/dev/mapper/vg-mysql"."""
    number: str
    """Its major and minor now; "" while it is not active."""
    consumes: bool
    """Whether the snapshot itself is used up; if not it stays, though its own id may be another one then."""
    write_bytes: int = 0
    """Upper bound of what will be written to the origin; 0 where it is exchanged at once."""
    loses: tuple[Reason, ...] = ()
    """What would be lost besides, other snapshots above all: only who forces it goes on."""
    blocked: tuple[Reason, ...] = ()
    """Why it cannot be done now; force or not."""
    remarks: tuple[str, ...] = ()
    """What is to be known before."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How a storage's client program is to mount, for `Remounting.client_mount`; the defaults are the client's."""

    writeback: bool = False
    """Whether a write is done once it is in the client's cache folder; the upload follows."""
    upload_delay_s: float = 0.0
    """With `writeback`: how long an upload waits, so that what is soon overwritten or deleted is never uploaded."""
    cache_bytes: int | None = None
    """Size of the local cache; None: the client's default."""
    cache_dir: str | None = None
    """Folder of the local cache; None: a fresh one that goes with the mount."""
    extra: tuple[str, ...] = ()
    """Further options of the client, as its command line takes them: ("--max-uploads", "150")."""


@dataclass(frozen=True, kw_only=True)
class ProvisionOrder:
    """What `Provisioner.provision` is to make."""

    id: str
    """16 hex digits: part of every name that is global on the machine (volume groups, mounts of clients)."""
    point: str
    """An empty folder to mount at, in the caller's mount namespace."""
    size_bytes: int
    """How much of the device to use, from its beginning; what lies behind is not touched."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The backend's own: {"file_system": "xfs"}; unknown ones are refused with ConfigError."""
    discard: bool = True
    """Whether the device is told beforehand that all of it is unused (TRIM), where it can be told."""


@dataclass(frozen=True, kw_only=True)
class Provisioned:
    """A storage that `Provisioner.provision` made."""

    path: str
    """An empty folder in it, writable for root, that the backend takes for a volume of its own."""
    devices: tuple[str, ...]
    """Block devices whose counters in /proc/diskstats hold everything that is read and written for it, once: the
    lowest ones. Empty if there is none."""
    capacity_bytes: int
    """What may be filled with data, so that snapshots still find room if all of it is overwritten once."""
    commands: tuple[tuple[str, ...], ...]
    """What was run, so that anyone can repeat it."""
    mount_options: tuple[str, ...] = ()
    """As the kernel reports them."""
    cache_dirs: tuple[str, ...] = ()
    """Folders in which a client of the storage keeps what it has read: files there may be removed at any time, so that
    the next read is none of its cache."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What a program printed and how it ended."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
