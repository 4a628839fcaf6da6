"""Volume groups on the scratch disk, origins with file systems on them, and a disk that is blank again afterwards.

Only in a guest or on a machine with a disk to spare: `SNAPMGR_TEST_DEV` names the disk, and it is wiped.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.contract.errors import CommandError
from snapmgr.system.command import CommandRunner
from support.storage import LeftBehindError, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUNNER = CommandRunner()
_SYS = Path("/sys/class/block")
_MKFS = {
    "btrfs": ("mkfs.btrfs", "--quiet", "--force"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
}
_PATIENCE_S = 20.0
_HEAD_BYTES = 4 << 20


def run(*argv: str | Path, ok: tuple[int, ...] = (0,), timeout_s: float = 120.0) -> str:
    """Run a program and return its stdout."""
    return RUNNER.run([str(word) for word in argv], ok=ok, timeout_s=timeout_s).stdout


def report(command: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows of lvs, vgs or pvs with these arguments; an oracle beside the backend's own reader."""
    done = json.loads(run(command, "--reportformat", "json", "--units", "b", "--nosuffix", *arguments))
    return next(iter(done["report"][0].values()))


# -------------------------------------------------------------------------------------------- what stands on the disk


def _name(node: str) -> str:
    """Return the kernel's name of a device: "dm-3" of /dev/mapper/…, which is no link where there is no udev."""
    number = os.stat(node).st_rdev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def mapped_name(name: str) -> str:
    """Given the kernel's name, "dm-3", return device-mapper's, "vg-lv"; "" for other devices."""
    return _read(_SYS / name / "dm" / "name")


def stack_above(node: str) -> list[str]:
    """Return the kernel's names of all that stands on a device, partitions included, topmost first."""
    found: list[str] = []

    def visit(name: str) -> None:
        folder = _SYS / name
        above = [path.name for path in (folder / "holders").glob("*")]
        above += [path.parent.name for path in folder.glob("*/partition")]
        above += _loops_on(name)
        for each in sorted(above):
            if each not in found:
                visit(each)
                found.append(each)

    visit(_name(node))
    return found


def _mounts() -> list[tuple[str, str, str]]:
    """Return (device number, source, mount point) of all mounts, in mount order."""
    rows = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        rows.append((fields[2], right.split()[1], fields[4].encode().decode("unicode_escape")))
    return rows


def _mounted_from(name: str) -> list[str]:
    """Return the mount points of a device, in mount order; those of a btrfs by their source."""
    number = _read(_SYS / name / "dev")
    return [point for dev, source, point in _mounts() if dev == number or _is_source(source, name)]


def _is_source(source: str, name: str) -> bool:
    try:
        return source.startswith("/dev/") and _name(source) == name
    except OSError:
        return False


def _loops_on(name: str) -> list[str]:
    """Return the loop devices whose files lie on a file system on this device."""
    points = _mounted_from(name)
    loops = []
    for folder in _SYS.glob("loop*"):
        file = _read(folder / "loop" / "backing_file")
        if file and any(Path(file).is_relative_to(point) for point in points):
            loops.append(folder.name)
    return loops


def clear(node: str) -> None:
    """Remove all that stands on a device: suspended or not, mounted or not, LVM, LUKS, MD, partitions, loop devices.

    The device itself and its content are left. Raises LeftBehindError with what could not be removed.
    """
    deadline = time.monotonic() + _PATIENCE_S
    errors: list[str] = []
    while names := stack_above(node):
        late = time.monotonic() > deadline
        if late and errors:
            raise LeftBehindError(f"cannot clear {node}: {'; '.join(errors)}")
        # What is suspended holds up whoever unmounts what stands on it.
        for name in reversed(names):
            if _read(_SYS / name / "dm" / "suspended") == "1":
                _attempt(errors, "dmsetup", "resume", mapped_name(name))
        errors.clear()
        for name in names:
            _remove(name, errors)
        if errors:
            time.sleep(0.1)
    _forget_links()


def _remove(name: str, errors: list[str]) -> None:
    for point in reversed(_mounted_from(name)):
        _attempt(errors, "umount", point)
    if mapped := mapped_name(name):
        _attempt(errors, "dmsetup", "remove", "--retry", mapped)
    elif name.startswith("md"):
        _attempt(errors, "mdadm", "--quiet", "--stop", f"/dev/{name}")
    elif name.startswith("loop"):
        _attempt(errors, "losetup", "--detach", f"/dev/{name}")
    elif number := _read(_SYS / name / "partition"):
        _blank(f"/dev/{name}")
        _attempt(errors, "delpart", f"/dev/{(_SYS / name).resolve().parent.name}", number)


def _attempt(errors: list[str], *argv: str) -> None:
    try:
        run(*argv, timeout_s=_PATIENCE_S)
    except CommandError as error:
        errors.append(str(error))


def _forget_links() -> None:
    """Remove the links of LVs that are gone: without udev nobody does, and no VG of that name can be made."""
    # What a killed command of LVM left, too: nodes of devices that are gone.
    run("dmsetup", "mknodes")
    for link in Path("/dev").glob("*/*"):
        if link.is_symlink() and not link.exists():
            link.unlink()
            with suppress(OSError):
                link.parent.rmdir()


def _blank(node: str) -> None:
    """Write zeros where signatures are: the first MiBs and the last."""
    with open(node, "r+b", buffering=0) as disk:
        size = disk.seek(0, os.SEEK_END)
        for start in {0, max(0, size - _HEAD_BYTES)}:
            disk.seek(start)
            disk.write(bytes(min(_HEAD_BYTES, size - start)))
        os.fsync(disk.fileno())


def wipe(disk: str) -> None:
    """Make a disk blank, whatever it holds and whoever uses it."""
    clear(disk)
    _blank(disk)


def scratch_disk() -> str:
    """Return the disk that tests may wipe: "/dev/ubda"."""
    disk = os.environ["SNAPMGR_TEST_DEV"]
    assert stat.S_ISBLK(os.stat(disk).st_mode), disk
    return disk


@contextmanager
def partitions(disk: str, count: int) -> Iterator[list[str]]:
    """Split a disk into equal parts, in the kernel alone: there is no partition table on it."""
    size = int(_read(_SYS / _name(disk) / "size")) // count - 2048
    before = set(Path("/dev").iterdir())
    try:
        for number in range(count):
            run("addpart", disk, str(number + 1), str(2048 + number * size), str(size))
        yield sorted(str(path) for path in set(Path("/dev").iterdir()) - before)
    finally:
        clear(disk)


# ------------------------------------------------------------------------------------------------------- volume groups


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A mounted logical volume."""

    vg: str
    lv: str
    device: str
    """"/dev/vg/lv"."""
    point: Path
    fs_type: str
    pool: str = ""
    """The thin pool that it lies in, if any."""


class VolumeGroup:
    """A volume group of our own; what is made in it lives until `clear`."""

    def __init__(self, name: str, devices: Sequence[str], folder: Path) -> None:
        self.name = name
        self.devices = tuple(devices)
        self._folder = folder
        self.spare: list[Origin] = []
        """Mounted origins that are as good as new, for whoever needs one; `clear` removes them too."""

    def make(self) -> None:
        """Make it, empty."""
        with suppress(OSError):
            Path("/dev", self.name).rmdir()  # left by a killed command of LVM
        run("vgcreate", "--yes", self.name, *self.devices)
        self.spare.clear()

    def clear(self) -> None:
        """Remove all that stands on its devices and make it anew, empty."""
        self.remove()
        self.make()

    def remove(self) -> None:
        """Remove it with all that stands on its devices, which are blank then."""
        for device in self.devices:
            clear(device)
        for device in self.devices:
            _blank(device)

    def lvs(self, *columns: str) -> list[dict[str, Any]]:
        """Return the rows of `lvs --all` with these columns ("lv_name", …)."""
        return report("lvs", "--all", "--options", ",".join(columns), self.name)

    def names(self) -> list[str]:
        """Return the names of its visible logical volumes."""
        return sorted(row["lv_name"] for row in report("lvs", "--options", "lv_name", self.name))

    def device(self, lv: str) -> str:
        """Return the path of a logical volume."""
        return f"/dev/{self.name}/{lv}"

    def pool(
        self, lv: str = "pool", *, data_mib: int = 1024, metadata_mib: int = 8, options: Sequence[str] = ()
    ) -> str:
        """Make a thin pool and return its name."""
        sizes = ["--size", f"{data_mib}m", "--poolmetadatasize", f"{metadata_mib}m"]
        run("lvcreate", "--yes", "--type", "thin-pool", *sizes, *options, "--name", lv, self.name)
        return lv

    def classic_origin(
        self, lv: str = "origin", *, size_mib: int = 512, fs_type: str = "ext4", options: Sequence[str] = ()
    ) -> Origin:
        """Make a logical volume with a file system and mount it."""
        run("lvcreate", "--yes", "--size", f"{size_mib}m", *options, "--name", lv, self.name)
        return self._mount(lv, fs_type)

    def thin_origin(
        self,
        lv: str = "thin",
        *,
        pool: str = "pool",
        size_mib: int = 512,
        fs_type: str = "xfs",
        options: Sequence[str] = (),
    ) -> Origin:
        """Make a thin logical volume in `pool` with a file system and mount it."""
        size = f"{size_mib}m"
        run(
            "lvcreate",
            "--yes",
            "--type",
            "thin",
            "--virtualsize",
            size,
            *options,
            "--name",
            lv,
            "--thinpool",
            pool,
            self.name,
        )
        return self._mount(lv, fs_type, pool)

    def _mount(self, lv: str, fs_type: str, pool: str = "") -> Origin:
        device, point = self.device(lv), self._folder / lv
        run(*_MKFS[fs_type], device)
        point.mkdir(exist_ok=True)
        run("mount", "-t", fs_type, device, point)
        # As a service's data folder would be: its own user makes files in it.
        point.chmod(0o755)
        return Origin(vg=self.name, lv=lv, device=device, point=point, fs_type=fs_type, pool=pool)


@contextmanager
def volume_group(devices: Sequence[str] = (), *, name: str = "vgtest") -> Iterator[VolumeGroup]:
    """Make a volume group on these devices, by default the whole scratch disk; all is removed in the end."""
    with work_folder() as folder:
        group = VolumeGroup(name, devices or [scratch_disk()], folder)
        try:
            group.make()
            yield group
        finally:
            group.remove()


# ------------------------------------------------------------------------------------------------------ stacked devices


@contextmanager
def luks(device: str, name: str = "snapmgr-crypt") -> Iterator[str]:
    """Encrypt a device and open it; yield the open one."""
    with work_folder() as folder:
        key = folder / "key"
        key.write_bytes(b"a key of tests")
        # The least work: how hard the key is to guess is not ours to test.
        cheap = ("--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000")
        run("cryptsetup", "luksFormat", "--batch-mode", *cheap, "--key-file", key, device)
        run("cryptsetup", "open", "--key-file", key, device, name)
        try:
            yield f"/dev/mapper/{name}"
        finally:
            clear(device)


@contextmanager
def mirror(devices: Sequence[str], node: str = "/dev/md0") -> Iterator[str]:
    """Make a RAID 1 of these devices."""
    plan = ["--create", node, "--run", "--level=1", f"--raid-devices={len(devices)}", "--assume-clean"]
    run("mdadm", "--quiet", *plan, *devices)
    try:
        yield node
    finally:
        for device in devices:
            clear(device)
            _blank(device)
