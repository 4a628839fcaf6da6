"""Which logical volume is below a folder, by what the kernel says of the devices there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from snapmgr.api import NotMine
from snapmgr.contract.records import BlockDevice, Mount, Target
from snapmgr_lvm.config import LvmConfig
from snapmgr_lvm.locating import Place, find_place, fstab_by_name

GROUP, VOLUME = "BOgRklIp33ViQPWVNAcSeHLChLv9NDJV", "gf8WDGtdVLMFoi13vhPeq9M62bzE2aXo"
PLACE = Place(
    group_uuid="BOgRkl-Ip33-ViQP-WVNA-cSeH-LChL-v9NDJV",
    volume_uuid="gf8WDG-tdVL-MFoi-13vh-Peq9-M62b-zE2aXo",
    encrypted=False,
)


def device(kind: str, *below: BlockDevice, dm_uuid: str | None = None) -> BlockDevice:
    return BlockDevice(
        name="x", path=f"/dev/{kind}", number="254:0", kind=kind, size_bytes=1 << 30, dm_uuid=dm_uuid, below=below
    )


def target(*devices: BlockDevice, fs_type: str = "xfs", **mount: Any) -> Target:
    values = {"id": 1, "parent_id": 0, "device": "254:0", "root": "/", "point": "/data", "source": "/dev/x", **mount}
    return Target(path="/data/db", mount=Mount(fs_type=fs_type, **values), devices=devices)


DISK = device("disk")
LV = device("lvm", device("crypt", device("raid", device("part", DISK))), dm_uuid=f"LVM-{GROUP}{VOLUME}")


def test_a_volume_on_luks_on_raid_on_a_partition_and_luks_on_a_volume():
    assert find_place(target(LV)) == PLACE
    luks = device("crypt", LV, dm_uuid="CRYPT-LUKS2-0123-name")
    found = find_place(target(luks))
    assert isinstance(found, Place)
    assert (found.volume_uuid, found.encrypted) == (PLACE.volume_uuid, True)


@pytest.mark.parametrize(
    ("devices", "fs_type", "why"),
    [
        ((), "tmpfs", "on tmpfs, which is on no block device"),
        ((device("part", DISK),), "ext4", r"\(part on disk\), which is not a logical volume"),
        ((device("lvm", DISK, dm_uuid=f"LVM-{GROUP}{VOLUME}-real"),), "ext4", "not a logical volume"),
        ((device("lvm", DISK, dm_uuid=f"LVM-{GROUP}"),), "ext4", "not a logical volume"),
        ((device("part", LV, dm_uuid="part1-LVM-x"),), "ext4", "not a logical volume"),
        ((LV,), "btrfs", "same file system UUID, and mounting it corrupts both"),
        ((DISK,), "btrfs", "is on btrfs$"),
        ((LV,), "f2fs", "were never tried"),
        ((LV, LV), "bcachefs", "not a logical volume"),
    ],
)
def test_what_is_no_volume_that_can_be_snapshotted(devices, fs_type, why):
    found = find_place(target(*devices, fs_type=fs_type))
    assert isinstance(found, NotMine)
    assert re.search(why, found.reason), found.reason


def test_an_fstab_that_names_the_file_system_by_what_a_snapshot_has_too():
    there = target(LV, point="/srv/my data")
    named = "# UUID=1 /srv/my\\040data xfs\nUUID=1234 /srv/my\\040data/ xfs defaults 0 0\n"
    assert fstab_by_name(there, named) == "UUID=1234"
    assert fstab_by_name(there, "LABEL=db /srv/my\\040data xfs") == "LABEL=db"
    assert fstab_by_name(there, "/dev/disk/by-uuid/1 /srv/my\\040data xfs") == "/dev/disk/by-uuid/1"
    assert fstab_by_name(there, "/dev/vg0/db /srv/my\\040data xfs\nUUID=1 /other xfs\nUUID=2\n\n") is None


@pytest.mark.parametrize(
    "values",
    [
        {"cow_size": "0%"},
        {"cow_size": "much"},
        {"cow_size": "0"},
        {"cow_size": "20"},
        {"scratch_size": " 512 "},
        {"cow_lifetime": "0"},
        {"scratch_size": "forecast"},
        {"pool_data_limit": "101%"},
        {"pool_metadata_limit": "80"},
        {"chunk_size": "3K"},
        {"chunk_size": "1M"},
        {"cow_lifetime": "long"},
        {"scratch_dir": "relative"},
        {"luks_key_file": "key"},
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_name(values):
    with pytest.raises(ValueError, match="^" + next(iter(values)) + ": "):
        LvmConfig(**values)
