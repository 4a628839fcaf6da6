"""Who uses a device, on trees that look like sysfs and /proc, for what this machine may not have; and what is on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from snapmgr.bench.device import blank
from snapmgr.bench.device.blank import partitions, signatures, uses
from snapmgr.contract.errors import CommandError
from snapmgr.contract.records import BlockDevice, Completed

NUMBER = "8:16"


@pytest.fixture(name="machine")
def _machine(tmp_path, monkeypatch):
    """A machine with one unused disk /dev/sdb: its sysfs, its /proc, and device numbers of files by their text."""
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    disk = sysfs / "devices/sdb"
    (disk / "queue").mkdir(parents=True)
    (disk / "holders").mkdir()
    (disk / "ro").write_text("0\n")
    (disk / "queue/zoned").write_text("none\n")
    (sysfs / "dev/block").mkdir(parents=True)
    (sysfs / "dev/block" / NUMBER).symlink_to(disk)
    proc.mkdir()
    monkeypatch.setattr(blank, "udev_properties", lambda _number: {})
    monkeypatch.setattr(blank, "refused_exclusively", lambda _path: "")
    monkeypatch.setattr(blank, "_number_of", lambda path: {"/dev/sdb": NUMBER, "/dev/sdb1": "8:17"}.get(path, ""))
    return sysfs, proc


@pytest.fixture(name="sdb")
def _sdb():
    return BlockDevice(name="sdb", path="/dev/sdb", number=NUMBER, kind="disk", size_bytes=1 << 30)


def used(machine, device) -> str:
    sysfs, proc = machine
    return "; ".join(uses(device, sysfs=sysfs, proc=proc))


def add_partition(sysfs: Path) -> None:
    part = sysfs / "devices/sdb/sdb1"
    (part / "holders").mkdir(parents=True)
    (part / "partition").write_text("1\n")
    (part / "dev").write_text("8:17\n")
    (part / "uevent").write_text("MAJOR=8\nMINOR=17\nDEVNAME=sdb1\n")
    (sysfs / "dev/block/8:17").symlink_to(part)


def test_nobody_uses_an_unused_disk(machine, sdb):
    assert used(machine, sdb) == ""


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("devices/sdb/ro", "1\n", "read-only"),
        ("devices/sdb/hidden", "1\n", "multipath"),
        ("devices/sdb/queue/zoned", "host-managed\n", "zoned"),
        ("devices/sdb/holders/dm-3/dm/name", "vg-data\n", r"held by dm-3 (vg-data): LVM"),
        ("devices/sdb/holders/md0/dev", "9:0\n", "held by md0"),
        ("fs/btrfs/5f-uuid/devices/sdb/dev", f"{NUMBER}\n", "part of the mounted btrfs 5f-uuid"),
        ("block/loop7/loop/backing_file", "/dev/sdb\n", "the loop device /dev/loop7 lies on /dev/sdb"),
        ("kernel/config/nvmet/subsystems/nqn.x/namespaces/1/device_path", "/dev/sdb\n", "exported over NVMe, by nqn.x"),
    ],
)
def test_each_use_that_sysfs_shows_is_told(machine, sdb, file, text, why):
    path = machine[0] / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert why in used(machine, sdb)


def test_a_partitions_use_is_its_disks_and_a_disks_use_is_its_partitions(machine, sdb):
    sysfs, proc = machine
    add_partition(sysfs)
    assert partitions(sdb, sysfs=sysfs) == (("8:17", "/dev/sdb1"),)
    assert used(machine, sdb) == ""
    (proc / "swaps").write_text("Filename Type Size Used Priority\n/dev/sdb1 partition 100 0 -2\n")
    assert used(machine, sdb) == "its partition /dev/sdb1: it is active swap space"
    part = BlockDevice(name="sdb1", path="/dev/sdb1", number="8:17", kind="part", size_bytes=1 << 20, below=(sdb,))
    assert used(machine, part) == "it is active swap space"
    (proc / "swaps").unlink()
    (sysfs / "devices/sdb/holders/md0").mkdir()
    assert used(machine, part).startswith("its disk /dev/sdb: held by md0")


def test_a_path_of_a_multipath_disk_is_in_use(machine, sdb, monkeypatch):
    monkeypatch.setattr(blank, "udev_properties", lambda _number: {"DM_MULTIPATH_DEVICE_PATH": "1"})
    assert "multipathd has it" in used(machine, sdb)


def test_a_disk_without_a_medium_is_in_no_state_to_be_used(machine):
    gone = BlockDevice(name="sdb", path="/dev/sdb", number=NUMBER, kind="disk", size_bytes=0)
    assert "no medium" in used(machine, gone)


def test_a_mount_is_found_in_any_namespace_and_told_once(machine, sdb):
    proc = machine[1]
    for pid, space, point in (("self", "mnt:[1]", "/srv"), ("7", "mnt:[1]", "/srv"), ("9", "mnt:[2]", "/inner")):
        (proc / pid / "ns").mkdir(parents=True)
        os.symlink(space, proc / pid / "ns/mnt")
        (proc / pid / "mountinfo").write_text(f"30 1 {NUMBER} / {point} rw - ext4 /dev/sdb rw\n")
    assert used(machine, sdb) == "mounted at /srv; mounted at /inner (mount namespace of process 9)"


# --------------------------------------------------------------------------------------------------- what is on it


@dataclass
class Probes:
    """blkid and wipefs that print what they are told to, by device."""

    blkid: dict[str, tuple[int, str]] = field(default_factory=dict)
    wipefs: dict[str, str] = field(default_factory=dict)

    def run(self, argv, *, ok=(0,), **_options):
        path = argv[-1]
        code, text = self.blkid.get(path, (2, "")) if argv[0] == "blkid" else (0, self.wipefs.get(path, ""))
        if code not in ok:
            raise CommandError(f"{argv[0]} failed")
        return Completed(argv=tuple(argv), returncode=code, stdout=text, stderr="")


def listed(*entries: str) -> str:
    return '{"signatures": [' + ", ".join(entries) + "]}"


def test_what_both_probes_find_is_told_once(machine, sdb):
    probes = Probes(
        blkid={"/dev/sdb": (0, "DEVNAME=/dev/sdb\nUUID=u-1\nLABEL=my\\ data\nTYPE=ext4\n")},
        wipefs={"/dev/sdb": listed('{"offset": "0x438", "type": "ext4", "uuid": "u-1", "label": "my data"}')},
    )
    (found,) = signatures(sdb, runner=probes, sysfs=machine[0])
    assert (found.signature, found.shown) == (("ext4", "u-1"), "ext4 (UUID u-1, label my data)")


def test_what_only_one_probe_finds_is_told(machine, sdb):
    probes = Probes(
        blkid={"/dev/sdb": (0, "PTUUID=1234\nPTTYPE=gpt\n")},
        wipefs={"/dev/sdb": listed('{"type": "gpt"}', '{"type": "PMBR"}', '{"type": "zfs_member", "uuid": "9"}')},
    )
    shown = [found.shown for found in signatures(sdb, runner=probes, sysfs=machine[0])]
    assert shown == ["gpt partition table (UUID 1234)", "PMBR partition table", "zfs_member (UUID 9)"]


def test_contradicting_signatures_are_a_finding(machine, sdb):
    (found,) = signatures(sdb, runner=Probes(blkid={"/dev/sdb": (8, "")}), sysfs=machine[0])
    assert "contradict" in found.shown


def test_a_partition_is_a_finding_even_if_nothing_is_on_it(machine, sdb):
    add_partition(machine[0])
    (found,) = signatures(sdb, runner=Probes(), sysfs=machine[0])
    assert (found.partition, found.shown) == (True, "a partition /dev/sdb1: nothing known")


@pytest.mark.parametrize("printed", ["no JSON", "[]", '{"signatures": [{"offset": 1}]}'])
def test_a_probe_that_says_something_odd_is_no_answer(machine, sdb, printed):
    with pytest.raises(CommandError, match="wipefs printed something unexpected about /dev/sdb"):
        signatures(sdb, runner=Probes(wipefs={"/dev/sdb": printed}), sysfs=machine[0])


def test_a_probe_that_fails_is_no_answer(machine, sdb):
    with pytest.raises(CommandError, match="blkid failed"):
        signatures(sdb, runner=Probes(blkid={"/dev/sdb": (4, "")}), sysfs=machine[0])
