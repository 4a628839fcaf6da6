"""What blockdev makes of recorded sysfs trees, mount tables and tool output of real LVM, LUKS, RAID and btrfs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from snapmgr.contract.errors import CommandError, MissingRequirementError, StorageError
from snapmgr.contract.records import Completed
from snapmgr.system import blockdev
from snapmgr.system.blockdev import MountTree, backing_file, btrfs_devices, device_stack, parse_blkid, parse_lsblk

RECORDING = json.loads((Path(__file__).parent / "blockdev/lvm-luks-md-btrfs.json").read_text())
MOUNTS = blockdev.parse_mountinfo(os.fsencode(RECORDING["mountinfo"]))
BTRFS = "fa1ec9ed-d925-4dc6-91a7-218be79d20f4"


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory):
    root = tmp_path_factory.mktemp("sys")
    for name, content in RECORDING["files"].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/.empty"):
            (root / name).write_text(content)
    for name, target in RECORDING["links"].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
        # The hardware behind a disk is not in the recording.
        (root / name).parent.joinpath(target).resolve().mkdir(parents=True, exist_ok=True)
    return root


class Replay:
    """A runner that answers from the recording and notes what was asked."""

    def __init__(self, *, lsblk=None, fail=()):
        self.asked: list[tuple[str, ...]] = []
        self.lsblk = RECORDING["lsblk"] if lsblk is None else lsblk
        self.fail = fail

    def run(self, argv, *, ok=(0,), timeout_s=60.0, **_options):
        self.asked.append(tuple(argv))
        assert timeout_s
        if argv[0] in self.fail:
            raise MissingRequirementError(f"the program {argv[0]} is not installed")
        out = json.dumps(self.lsblk) if argv[0] == "lsblk" else RECORDING["blkid"][argv[-1]]
        code = 0 if out else 2
        assert code in ok
        return Completed(argv=tuple(argv), returncode=code, stdout=out, stderr="")


def mount_at(point):
    return MountTree(MOUNTS).find(point)


def shape(device):
    """Return a device and what is below it as one line."""
    below = ", ".join(shape(lower) for lower in device.below)
    return f"{device.kind} {device.dm_name or device.name}" + (f" ({below})" if below else "")


DISK = "part ubda1 (disk ubda)"
VAULT = f"crypt vault ({DISK})"


@pytest.mark.parametrize(
    ("point", "stack"),
    [
        ("/srv/data dir", f"lvm vg0-data (lvm vg0-data-real ({VAULT}))"),
        ("/srv/snap", f"lvm vg0-snap (lvm vg0-data-real ({VAULT}), lvm vg0-snap-cow ({VAULT}))"),
        (
            "/srv/thin",
            f"lvm vg0-thin (lvm vg0-pool-tpool (lvm vg0-pool_tmeta ({VAULT}), lvm vg0-pool_tdata ({VAULT})))",
        ),
        ("/srv/md", "raid md0 (part ubda2 (disk ubda), part ubda3 (disk ubda))"),
        # The bind mount is the LV's, wherever it is.
        ("/srv/btrfs/below", f"lvm vg0-data (lvm vg0-data-real ({VAULT}))"),
    ],
)
def test_the_stack_below_a_mount(sysfs, point, stack):
    assert shape(device_stack(mount_at(point).device, sysfs=sysfs)) == stack


def test_a_logical_volume_has_its_uuid_size_and_node(sysfs):
    device = device_stack(mount_at("/srv/data dir").device, sysfs=sysfs)
    assert (device.name, device.path, device.number) == ("dm-1", "/dev/dm-1", "254:1")
    assert device.dm_uuid == "LVM-htPsympgNUpFslndtUehWctwffeC5UUOEt67IdT4zWBtwMYoyzPs7TNWV3LW51Ms"
    assert device.size_bytes == 64 * 1024**2


def test_a_btrfs_of_two_devices(sysfs):
    numbers = btrfs_devices(BTRFS, sysfs=sysfs)
    stacks = [device_stack(number, sysfs=sysfs) for number in numbers]
    assert [shape(device) for device in stacks] == ["loop loop0", "part ubda4 (disk ubda)"]
    assert backing_file(stacks[0], sysfs=sysfs) == "/run/img"
    assert backing_file(stacks[1], sysfs=sysfs) is None
    with pytest.raises(StorageError, match="cannot read"):
        btrfs_devices("00000000-0000-0000-0000-000000000000", sysfs=sysfs)


def test_udevs_properties_are_taken_for_each_device(sysfs):
    known = {"254:1": {"ID_FS_TYPE": "ext4", "ID_FS_UUID": "u1"}, "98:1": {"ID_FS_TYPE": "crypto_LUKS"}}
    device = device_stack("254:1", sysfs=sysfs, properties=lambda number: known.get(number, {}))
    assert (device.fs_type, device.fs_uuid) == ("ext4", "u1")
    partition = device.below[0].below[0].below[0]
    assert (partition.name, partition.fs_type, partition.fs_uuid) == ("ubda1", "crypto_LUKS", None)


def test_a_device_that_is_not_there_is_an_error(sysfs):
    with pytest.raises(StorageError, match="the block device 254:77 cannot be read") as caught:
        device_stack("254:77", sysfs=sysfs)
    assert caught.value.hint


def test_every_recorded_mount_is_read():
    points = [mount.point for mount in MOUNTS]
    assert "/srv/odd\tna\\me\nx" in points
    assert "/srv/data dir" in points
    assert len(MOUNTS) == RECORDING["mountinfo"].count("\n")
    over = mount_at("/srv/over")
    assert over.super_options == ("rw", "lowerdir=/run/lo\\,w", "upperdir=/run/up", "workdir=/run/wk")
    odd = mount_at("/srv/odd\tna\\me\nx/db")
    assert (odd.root, odd.fs_type, odd.source) == ("/@mysql", "btrfs", "/dev/ubda4")
    assert "subvolid=256" in odd.super_options


def test_of_mounts_over_each_other_the_last_counts():
    assert mount_at("/srv/hidden").source == "three"
    # Two is mounted in one, which three hides.
    assert mount_at("/srv/hidden/under").source == "three"
    assert mount_at("/srv/btrfs/below/x").source == "/dev/mapper/vg0-data"
    assert mount_at("/srv/btrfs/belowx").fs_type == "btrfs"


def test_lsblk_knows_nothing_without_udev_so_blkid_is_asked_for_the_top(sysfs):
    replay = Replay()
    stacks = [device_stack(number, sysfs=sysfs) for number in ("254:9", "9:0")]
    thin, raid = blockdev._probe(stacks, replay)
    assert (thin.fs_type, thin.fs_uuid) == ("xfs", "70209c11-46e6-442e-a639-a34eb5184ccf")
    assert (raid.fs_type, raid.fs_uuid) == ("ext4", "018b1903-b42c-400b-bbae-3aa0bcf5b1a1")
    assert [argv[0] for argv in replay.asked] == ["lsblk", "blkid", "blkid"]
    assert replay.asked[0][-2:] == ("/dev/dm-9", "/dev/md0")


def with_types(entries):
    """Return recorded lsblk entries as they look where udevd runs: with the types and UUIDs that blkid saw."""
    filled = []
    for entry in entries:
        facts = parse_blkid(RECORDING["blkid"][f"/dev/{kernel_name(entry['maj:min'])}"])
        entry = entry | {"fstype": facts.get("TYPE"), "uuid": facts.get("UUID")}  # noqa: PLW2901 - a changed copy
        if "children" in entry:
            entry["children"] = with_types(entry["children"])
        filled.append(entry)
    return filled


def kernel_name(number):
    return RECORDING["links"][f"dev/block/{number.strip()}"].rsplit("/", 1)[-1]


def test_what_lsblk_knows_fills_the_whole_stack_and_blkid_is_not_asked(sysfs):
    replay = Replay(lsblk={"blockdevices": with_types(RECORDING["lsblk"]["blockdevices"])})
    (data,) = blockdev._probe([device_stack("254:1", sysfs=sysfs)], replay)
    vault = data.below[0].below[0]
    assert (data.fs_uuid, vault.fs_type, vault.below[0].fs_type) == (
        "62b674c4-3cd7-4977-8ae5-7096fced3cc7",
        "LVM2_member",
        "crypto_LUKS",
    )
    assert [argv[0] for argv in replay.asked] == ["lsblk"]


@pytest.mark.parametrize("fail", [("lsblk",), ("blkid",), ("lsblk", "blkid")])
def test_a_missing_probe_leaves_the_uuid_unknown_and_harms_nothing(sysfs, fail):
    (thin,) = blockdev._probe([device_stack("254:9", sysfs=sysfs)], Replay(fail=fail))
    assert (thin.fs_uuid is None) == ("blkid" in fail)
    assert thin.dm_name == "vg0-thin"


def test_a_signature_of_another_type_than_the_mounted_one_is_not_believed(sysfs):
    thin = blockdev.replace(device_stack("254:9", sysfs=sysfs), fs_type="btrfs")
    (probed,) = blockdev._probe([thin], Replay())
    assert (probed.fs_type, probed.fs_uuid) == ("btrfs", None)


@pytest.mark.parametrize("text", ["{", "[]", '{"blockdevices": [{}]}', '{"blockdevices": 3}', "null"])
def test_unexpected_lsblk_output_is_an_error(text):
    with pytest.raises(CommandError, match="cannot be parsed"):
        parse_lsblk(text)


def test_lsblk_of_nothing_is_nothing():
    assert parse_lsblk("") == {}


def test_blkids_export_is_unescaped():
    facts = parse_blkid(RECORDING["blkid"]["/dev/dm-0"])
    assert (facts["TYPE"], facts["VERSION"]) == ("LVM2_member", "LVM2 001")
    assert parse_blkid("LABEL=a\\ b\\\\c=d\n") == {"LABEL": "a b\\c=d"}
    assert parse_blkid("") == {}


def test_the_recording_names_no_machine():
    assert not re.search(r"/home|hostname|/root/", json.dumps(RECORDING))
