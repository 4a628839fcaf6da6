"""Limits the memory of a sample, including its page cache, by a control group of version 2.

The kernel charges a page to the group that touches it first. So the measuring process enters the group, and all its
children follow it.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError, StorageError
from snapmgr.contract.records import Reason
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/sys/fs/cgroup")
"""Mount point of control groups version 2."""
_PREFIX = "snapmgr-bench-"
# For Python and fio themselves.
_LEAST_BYTES = 64 << 20
_EMPTY_S = 5.0


def memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the machine's memory."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    raise StorageError(f"{meminfo} does not say how much memory there is", hint="is /proc mounted?")


def nominal_bytes(found_bytes: int) -> int:
    """Return found_bytes for output and comparison, rounded up to a quarter of the power of two below it.

    The kernel reserves an amount that differs by some MiB from boot to boot; a run must still continue after a reboot.
    """
    step = 1 << max(found_bytes.bit_length() - 3, 0)
    return -(-found_bytes // step) * step


def missing_requirement(root: Path | None = None) -> Reason | None:
    """Return why memory cannot be limited here; None if it can. Enables the controller if necessary."""
    root = root or ROOT
    if not (root / "cgroup.controllers").exists():
        return Reason(
            what=f"cannot limit memory: there are no control groups of version 2 at {root}",
            hint="use data larger than the memory, or boot with systemd.unified_cgroup_hierarchy=1",
        )
    if "memory" not in (root / "cgroup.controllers").read_text(encoding="ascii").split():
        return Reason(
            what="cannot limit memory: the kernel's control groups of version 2 have no memory controller",
            hint="use data larger than the memory, or boot with cgroup_no_v1=memory",
        )
    try:
        if "memory" not in (root / "cgroup.subtree_control").read_text(encoding="ascii").split():
            (root / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    except OSError as error:
        return Reason(
            what=f"cannot limit memory: {root}: {error.strerror}",
            hint="run it as root outside of a container, or use data larger than the memory",
        )
    return None


@contextmanager
def bounded(name: str, limit_bytes: int, *, root: Path | None = None) -> Iterator[bool]:
    """Keep this process and its children within `limit_bytes` of memory; yield whether a limit was needed.

    A limit of the machine's memory or more needs none. Swap is not allowed. `name` is unique; `remove_group` removes
    the group after a SIGKILL. Raises MissingRequirementError if memory cannot be limited, StorageError for too little.
    """
    root = root or ROOT
    if limit_bytes >= memory_bytes():
        yield False
        return
    if limit_bytes < _LEAST_BYTES:
        raise StorageError(
            f"{format_size(limit_bytes)} of memory are too little for a benchmark",
            hint=f"{format_size(_LEAST_BYTES)} will do",
        )
    if (reason := missing_requirement(root)) is not None:
        raise MissingRequirementError(reason.what, hint=reason.hint)
    group, before = root / f"{_PREFIX}{name}", _group_of_this_process(root)
    try:
        group.mkdir()
        (group / "memory.max").write_text(f"{limit_bytes}\n", encoding="ascii")
        with suppress(FileNotFoundError):  # a kernel without swap
            (group / "memory.swap.max").write_text("0\n", encoding="ascii")
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n", encoding="ascii")
    except OSError as error:
        remove_group(name, root=root)
        raise MissingRequirementError(
            f"cannot limit memory by {group}: {error.strerror}", hint="run it outside of a container"
        ) from None
    try:
        yield True
    finally:
        (before / "cgroup.procs").write_text(f"{os.getpid()}\n", encoding="ascii")
        remove_group(name, root=root)


def remove_group(name: str, *, root: Path | None = None) -> None:
    """Remove the group of `bounded` once it is empty; its charges go to its parent. Idempotent."""
    group = (root or ROOT) / f"{_PREFIX}{name}"
    deadline = time.monotonic() + _EMPTY_S
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            # A killed process stays in the group until it is reaped.
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _group_of_this_process(root: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        # cgroups(7): the line "0::/user.slice/…" is that of version 2.
        if line.startswith("0::"):
            return root / line.removeprefix("0::").lstrip("/")
    return root
