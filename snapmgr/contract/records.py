"""Defines the records of the backend interface; plugins import them from `snapmgr.api`.

Every record is a frozen, keyword-only `msgspec.Struct`; units are in the names. ``*_ns`` are nanoseconds of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from snapmgr.contract.errors import StorageError
from snapmgr.contract.recordpath import Inner, Name, PoolId, Token


class Reason(Struct, frozen=True, kw_only=True):
    """A missing requirement or an obstacle, and its remedy."""

    what: str
    hint: str


class BlockDevice(Struct, frozen=True, kw_only=True):
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
    below: "tuple[BlockDevice, ...]" = ()


class Mount(Struct, frozen=True, kw_only=True):
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


class Target(Struct, frozen=True, kw_only=True):
    """A directory to be snapshotted, resolved, with the storage below it."""

    path: str
    """Absolute, symlinks resolved."""
    mount: Mount
    """The mount that holds `path`."""
    devices: tuple[BlockDevice, ...] = ()
    """The device or devices (btrfs may have several) that hold the file system; empty for network file systems."""
    submounts: tuple[Mount, ...] = ()
    """Other mounts below `path`; a snapshot of the file system has empty folders there."""


PoolKey = tuple[str, str]
"""`Pool.key`: backend and id."""


class Pool(Struct, frozen=True, kw_only=True):
    """A place that holds snapshots: a btrfs file system, a volume group, a folder of copies."""

    backend: str
    id: PoolId
    """The storage's own id (file system UUID, VG UUID, …); for a folder its path."""
    hint: str
    """Where it was last seen (a mount point, a device); only to find it faster and to name it in messages."""

    @property
    def key(self) -> PoolKey:
        """The pool's identity, wherever it is mounted."""
        return (self.backend, self.id)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.backend} {self.hint}"


class Volume(Struct, frozen=True, kw_only=True):
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
    """Absolute paths at or below `path` that a snapshot would *not* include: nested subvolumes and mounts."""
    warnings: tuple[str, ...] = ()
    label: str = ""
    """Its name in messages, if the id is not readable: "vg0/db (classic snapshot)"."""

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return self.label or self.id


class NotMine(Struct, frozen=True, kw_only=True):
    """Why a backend cannot snapshot a target."""

    reason: str
    hint: str | None = None
    foreign: bool = False
    """Whether the target is on another kind of storage than the backend's: users then read another backend's reason."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """A backend's guarantees for given volumes."""

    atomicity: Literal["file", "volume"]
    """"volume": all of one volume in one instant. "file": each file for itself; refused for live servers."""
    clone: Literal["native", "scratch", "none"]
    """How `attach(writable=True)` makes its copy: in the storage, on scratch space, or not at all."""
    survives_origin: bool
    """Whether a snapshot stays usable after its origin was deleted."""


class Reservoir(Struct, frozen=True, kw_only=True):
    """A space that can fill up, and the consequence."""

    name: str
    size_bytes: int
    used_bytes: int
    when_full: Literal["snapshot_lost", "origin_errors", "no_snapshots", "no_growth"]
    """"no_growth": the pool's other spaces cannot grow any more, and that alone harms nobody."""
    wanted_bytes: int = 0
    """How much of it the next snapshot allocates."""


class SnapshotRef(Struct, frozen=True, kw_only=True):
    """A snapshot: our id together with the storage's own id, which alone identifies it."""

    backend: str
    snapshot_id: Name
    pool: Pool
    volume_id: str
    """The origin's id (`Volume.id`)."""
    name: Inner
    """Its name in the pool: where to look first."""
    native_id: str
    """The storage's own id of the snapshot (subvolume UUID, LV UUID, …).

    A snapshot with another id is never touched.
    """

    @property
    def identity(self) -> tuple[str, str, str]:
        """Its identity, which does not change when the pool is mounted elsewhere or the snapshot is renamed."""
        return (self.backend, self.pool.id, self.native_id)


class Gauge(Reservoir, frozen=True, kw_only=True):
    """The usage of a reservoir of a pool, as read by `CapacityReporting.gauges`."""

    pool: Pool
    ref: SnapshotRef | None = None
    """The snapshot whose own space it is (a CoW table); None if it is shared."""
    volume_ids: tuple[str, ...] = ()
    """For a shared space: the origins whose snapshots it affects; () for all in the pool."""
    valid: bool = True
    """False: it overflowed. `ref` is lost; without `ref`, the volumes that share it can no longer be written."""


class Intent(Struct, frozen=True, kw_only=True):
    """A snapshot that `fire` will create; written to disk before, so that a crash leaves nothing unknown."""

    pool: Pool
    volume_id: str
    name: Inner
    about: str = ""
    """Decisions about it and their reasons, to print: the size of its CoW table."""


class Shot(Struct, frozen=True, kw_only=True):
    """One snapshot that exists now, with the storage call's start and finish (CLOCK_MONOTONIC)."""

    ref: SnapshotRef
    start_ns: int
    finish_ns: int


class FireError(StorageError):
    """`Armed.fire` failed; `shots` are the members that were created anyway."""

    def __init__(self, message: str, *, hint: str | None = None, shots: tuple[Shot, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.shots = shots


class AttachRecord(Struct, frozen=True, kw_only=True):
    """An attachment's record; it is on disk before `attach` is called, so that `detach` works after any crash."""

    id: Token
    """16 hex digits; part of the name of everything that the backend creates for this attachment."""
    ref: SnapshotRef
    writable: bool
    boot_id: str
    """/proc/sys/kernel/random/boot_id at attach time: mounts and loop devices of another boot are gone."""
    overlay: bool = False
    """Whether, instead of a clone, the core may mount an overlay over the snapshot: for one command of the user that
    reads more than it changes. A backend whose clones are quick ignores it."""


class Attachment(Struct, frozen=True, kw_only=True):
    """The result of `attach`: a directory, or a device that the core mounts."""

    directory: str | None = None
    device: str | None = None
    fs_type: str | None = None
    options: tuple[str, ...] = ()
    """Mount options; the core adds nosuid, nodev, and "ro" if requested."""


class Found(Struct, frozen=True, kw_only=True):
    """An object of ours in a pool, as `inventory` found it."""

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
    """The last note stored by `annotate`."""
    why: str = ""
    """For debris: the problem, to print."""
    cure: str = "removes it"
    """For debris: the action of `Backend.repair`, to print."""


class Usage(Struct, frozen=True, kw_only=True):
    """The space that a snapshot takes."""

    exclusive_bytes: int | None
    """Bytes that its deletion would free; None if measuring that is expensive."""
    valid: bool = True
    """False: the storage lost it (an overflowed CoW table)."""


class RevertPlan(Struct, frozen=True, kw_only=True):
    """The consequences of an in-place restore of one origin, as found by `Revertible.revert_plan`."""

    origin: str
    """Name of the origin, to print: "vg/mysql"."""
    device: str
    """Its device node, which keeps its name: "/dev/mapper/vg-mysql"."""
    number: str
    """Its current major and minor number; "" if it is not active."""
    consumes: bool
    """Whether the restore consumes the snapshot; if not, the snapshot stays, but its own id may change."""
    write_bytes: int = 0
    """Upper bound of the bytes written to the origin; 0 if it is replaced in one step."""
    loses: tuple[Reason, ...] = ()
    """Further losses, such as other snapshots; these need --force."""
    blocked: tuple[Reason, ...] = ()
    """Obstacles that --force does not remove."""
    remarks: tuple[str, ...] = ()
    """Warnings for the user before the restore."""


class ClientOptions(Struct, frozen=True, kw_only=True):
    """Mount options of a storage's client program, for `Remounting.client_mount`; defaults are the client's."""

    writeback: bool = False
    """Whether a write completes once it is in the client's cache folder; the upload follows."""
    upload_delay_s: float = 0.0
    """With `writeback`: how long an upload waits, so that data soon overwritten or deleted are never uploaded."""
    cache_bytes: int | None = None
    """Size of the local cache; None: the client's default."""
    cache_dir: str | None = None
    """Folder of the local cache; None: a new one that is removed with the mount."""
    extra: tuple[str, ...] = ()
    """Further options of the client, as its command line takes them: ("--max-uploads", "150")."""


class ProvisionOrder(Struct, frozen=True, kw_only=True):
    """The storage that `Provisioner.provision` is to create."""

    id: str
    """16 hex digits: part of every name that is global on the machine (volume groups, mounts of clients)."""
    point: str
    """An empty folder to mount at, in the caller's mount namespace."""
    size_bytes: int
    """How much of the device to use, from its beginning; the rest is not touched."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The backend's own: {"file_system": "xfs"}; unknown ones are refused with ConfigError."""
    discard: bool = True
    """Whether to discard (TRIM) the whole device before, if it supports that."""


class BenchStorage(Struct, frozen=True, kw_only=True):
    """A storage that a backend contributes to the benchmark."""

    name: str
    """For ``--stacks``: small letters, digits, "+", "." and "-"; unique among all storages."""
    title: str
    """In words: "ext4, plain copies"."""
    options: Mapping[str, str] = field(default_factory=dict)
    """`ProvisionOrder.options`; the file system under ``file_system`` is looked for in the kernel first."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The backend's configuration on this storage, in place of ``[backend.NAME]``; ``{point}`` stands for the order's
    point: {"store": "{point}/copies"}."""


class Provisioned(Struct, frozen=True, kw_only=True):
    """A storage that `Provisioner.provision` created."""

    path: str
    """An empty folder in it, writable for root, that the backend accepts as a volume."""
    devices: tuple[str, ...]
    """The lowest block devices, whose counters in /proc/diskstats count everything read and written for it once;
    empty without such devices."""
    capacity_bytes: int
    """The amount of data that still leaves space for snapshots if all data are overwritten once."""
    commands: tuple[tuple[str, ...], ...]
    """The commands that were run, so that anyone can repeat them."""
    mount_options: tuple[str, ...] = ()
    """As the kernel reports them."""
    cache_dirs: tuple[str, ...] = ()
    """Folders of the client's read cache. Files there may be removed at any time, to make the next read uncached."""


class Completed(Struct, frozen=True, kw_only=True):
    """The output and exit code of a program."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
