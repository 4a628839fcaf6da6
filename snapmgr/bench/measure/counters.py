"""Counts the cost of a measured part: bytes at the devices, CPU seconds, and steal time of the hypervisor."""

from __future__ import annotations

import os
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench.model import Spent
from snapmgr.contract.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The unit of /proc/diskstats, independent of the device's own sectors (Documentation/admin-guide/iostats.rst).
_SECTOR = 512
_NUMBERS = 11
_ABSENT = "the device {} is gone: the kernel counts nothing for it"


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    """The counters of a device since its creation, without discards and flushes."""

    reads: int
    read_bytes: int
    writes: int
    written_bytes: int


@dataclass(frozen=True, kw_only=True)
class CpuCounts:
    """Seconds since boot, of all processors together."""

    busy_s: float
    """Everything but idle, iowait and steal."""
    steal_s: float


@dataclass(kw_only=True)
class MeasuredPart:
    """A part under measurement; `spent` is available once its context has ended, even by an exception."""

    _spent: Spent | None = None

    @property
    def spent(self) -> Spent:
        """Return its cost. Raises RuntimeError before its end."""
        if self._spent is None:
            raise RuntimeError("the cost of a part is known after it has ended")
        return self._spent

    @spent.setter
    def spent(self, value: Spent) -> None:
        self._spent = value


class Counters:
    """Counts the work of given devices and of the machine's processors during a part.

    Args:
        devices: nodes ("/dev/loop3", "/dev/mapper/vg-lv"), each counted once even if named twice; may be empty.

    Raises StorageError if one is not a block device.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._numbers = {device_number(device): device for device in devices}

    @contextmanager
    def measured(self) -> Iterator[MeasuredPart]:
        """Count from here to the context's end.

        The kernel counts data that reached the device: sync before the end to count all writes. Raises StorageError if
        a device vanishes.
        """
        part = MeasuredPart()
        before, cpu_before, start = self._counts(), read_cpu(), time.monotonic()
        yield part
        seconds, cpu, after = time.monotonic() - start, read_cpu(), self._counts()
        part.spent = Spent(
            seconds=seconds,
            cpu_seconds=cpu.busy_s - cpu_before.busy_s,
            steal_seconds=cpu.steal_s - cpu_before.steal_s,
            reads=after.reads - before.reads,
            read_bytes=after.read_bytes - before.read_bytes,
            writes=after.writes - before.writes,
            written_bytes=after.written_bytes - before.written_bytes,
        )

    def _counts(self) -> DeviceCounts:
        # Every open of /proc/diskstats walks all devices, so it is skipped without devices.
        found = parse_diskstats(Path("/proc/diskstats").read_text(encoding="ascii")) if self._numbers else {}
        for number, device in self._numbers.items():
            if number not in found:
                raise StorageError(_ABSENT.format(device))
        mine = [found[number] for number in self._numbers]
        return DeviceCounts(
            reads=sum(one.reads for one in mine),
            read_bytes=sum(one.read_bytes for one in mine),
            writes=sum(one.writes for one in mine),
            written_bytes=sum(one.written_bytes for one in mine),
        )


def device_number(device: str) -> str:
    """Given a device node, return its major and minor: "7:3". Raises StorageError if it is not one."""
    try:
        status = os.stat(device)
    except OSError as error:
        raise StorageError(f"{device}: {error.strerror}") from None
    if not stat.S_ISBLK(status.st_mode):
        raise StorageError(f"{device} is not a block device")
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def parse_diskstats(text: str) -> Mapping[str, DeviceCounts]:
    """Given the text of /proc/diskstats, return the counts by major and minor ("7:3")."""
    found = {}
    for line in text.splitlines():
        major, minor, _name, *numbers = line.split()
        # Kernels before 4.18 had 11 numbers, newer ones append discards and flushes.
        if len(numbers) >= _NUMBERS:
            found[f"{major}:{minor}"] = DeviceCounts(
                reads=int(numbers[0]),
                read_bytes=int(numbers[2]) * _SECTOR,
                writes=int(numbers[4]),
                written_bytes=int(numbers[6]) * _SECTOR,
            )
    return found


def parse_cpu(text: str, *, ticks_per_s: int) -> CpuCounts:
    """Given the text of /proc/stat (proc_stat(5)) and its unit, return the time of all processors."""
    # "user" already includes guest time.
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.splitlines()[0].split()[1:9])
    return CpuCounts(
        busy_s=(user + nice + system + irq + softirq) / ticks_per_s,
        steal_s=steal / ticks_per_s,
    )


def read_cpu() -> CpuCounts:
    """Return the time of all processors so far; the kernel counts hundredths of a second."""
    return parse_cpu(Path("/proc/stat").read_text(encoding="ascii"), ticks_per_s=os.sysconf("SC_CLK_TCK"))
