"""Which word tells a device from all others, on trees that look like sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from snapmgr.bench.device.identity import identify, normal
from snapmgr.contract.records import BlockDevice


class Tree:
    """A sysfs with the disks that a test gives it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/block").mkdir(parents=True)
        (root / "block").mkdir()

    def disk(self, name: str, number: str, **attributes: str | bytes) -> BlockDevice:
        folder = self.root / "devices" / name
        (folder / "device").mkdir(parents=True)
        (folder / "dev").write_text(f"{number}\n")
        for key, value in attributes.items():
            data = value if isinstance(value, bytes) else f"{value}\n".encode()
            (folder / key.replace("__", "/")).write_bytes(data)
        (self.root / "dev/block" / number).symlink_to(folder)
        (self.root / "block" / name).symlink_to(folder)
        return BlockDevice(name=name, path=f"/dev/{name}", number=number, kind="disk", size_bytes=1 << 30)


@pytest.fixture(name="tree")
def _tree(tmp_path, monkeypatch):
    monkeypatch.setattr("snapmgr.bench.device.identity.udev_properties", lambda _number: {})
    return Tree(tmp_path / "sys")


def told(tree, device, by_id=Path("/nowhere")):
    found = identify(device, sysfs=tree.root, by_id=by_id)
    return found.source, found.text


def test_an_nvme_disks_serial_number_and_model(tree):
    disk = tree.disk("nvme0n1", "259:0", device__serial="S5Y1NG0R   ", device__model="Samsung SSD 980", wwid="eui.01")
    assert told(tree, disk) == ("serial", "S5Y1NG0R")
    assert identify(disk, sysfs=tree.root).model == "Samsung SSD 980"


def test_a_virtio_disks_serial_number_and_no_model(tree):
    assert told(tree, tree.disk("vda", "254:0", serial=b"disk-7", device__vendor="0x1af4")) == ("serial", "disk-7")


def test_a_scsi_disks_serial_number_by_its_page_of_product_data(tree):
    disk = tree.disk("sda", "8:0", device__vpd_pg80=b"\0\x80\0\x08  WX12AB", device__vendor="ATA", device__model="WDC")
    assert told(tree, disk) == ("serial", "WX12AB")
    assert identify(disk, sysfs=tree.root).model == "WDC"


def test_udev_knows_what_sysfs_does_not(tree, monkeypatch):
    facts = {"ID_SERIAL_SHORT": "FROMUDEV", "ID_MODEL": "USB_Stick"}
    monkeypatch.setattr(
        "snapmgr.bench.device.identity.udev_properties", lambda number: facts if number == "8:16" else {}
    )
    disk = tree.disk("sdb", "8:16")
    assert told(tree, disk) == ("serial", "FROMUDEV")
    assert identify(disk, sysfs=tree.root).model == "USB Stick"


def test_without_a_serial_number_the_wwn_and_without_both_the_name_by_id(tree, tmp_path):
    assert told(tree, tree.disk("sda", "8:0", device__wwid="naa.5000", serial="0000 0000")) == ("wwn", "naa.5000")
    links = tmp_path / "by-id"
    links.mkdir()
    for name in ("usb-Stick-0:0", "dm-name-x", "lvm-pv-uuid-y"):
        (links / name).symlink_to("/dev/sdz")
    disk = tree.disk("sdz", "65:144")
    assert told(tree, disk, links) == ("by-id", "usb-Stick-0:0")
    nothing = identify(disk, sysfs=tree.root, by_id=tmp_path)
    assert nothing.text == ""
    assert "neither a serial number nor a WWN" in nothing.why_not


def test_a_partition_has_its_disks_word_with_its_number(tree):
    disk = tree.disk("sda", "8:0", serial="S1")
    tree.disk("sda3", "8:3", partition="3")
    part = replace(disk, name="sda3", path="/dev/sda3", number="8:3", kind="part", below=(disk,))
    assert told(tree, part) == ("serial", "S1-part3")
    nameless = tree.disk("sdb", "8:16")
    part = replace(part, below=(nameless,))
    assert told(tree, part) == ("", "")
    assert identify(part, sysfs=tree.root).why_not


def test_a_serial_number_that_two_disks_share_is_none(tree):
    one = tree.disk("sda", "8:0", serial="0123456789AB")
    tree.disk("sdb", "8:16", serial="0123456789AB")
    found = identify(one, sysfs=tree.root)
    assert (found.text, found.twin) == ("", "")
    assert "/dev/sdb has the same serial" in found.why_not


def test_namespaces_of_one_nvme_disk_are_told_apart_by_their_wwn(tree):
    one = tree.disk("nvme0n1", "259:0", device__serial="S1", wwid="eui.01")
    two = tree.disk("nvme0n2", "259:1", device__serial="S1", wwid="eui.02")
    assert [told(tree, disk) for disk in (one, two)] == [("wwn", "eui.01"), ("wwn", "eui.02")]


def test_two_paths_to_one_disk_are_seen_and_hidden_ones_are_not_counted(tree):
    one = tree.disk("sda", "8:0", device__wwid="naa.5000", serial="S1")
    tree.disk("sdb", "8:16", device__wwid="naa.5000", serial="S1")
    assert identify(one, sysfs=tree.root).twin == "/dev/sdb"
    nvme = tree.disk("nvme0n1", "259:0", wwid="eui.01", hidden="0")
    tree.disk("nvme0c0n1", "259:1", wwid="eui.01", hidden="1")
    assert identify(nvme, sysfs=tree.root) == identify(nvme, sysfs=tree.root)
    assert (told(tree, nvme), identify(nvme, sysfs=tree.root).twin) == (("wwn", "eui.01"), "")


def test_device_mapper_gives_its_devices_names_that_last(tree):
    volume = BlockDevice(name="dm-3", path="/dev/dm-3", number="253:3", kind="lvm", size_bytes=1, dm_uuid="LVM-abc")
    assert told(tree, volume) == ("device-mapper", "LVM-abc")


def test_memory_that_the_kernel_made_a_disk_of_has_none(tree):
    disk = replace(tree.disk("zram0", "252:0"), kind="zram")
    assert told(tree, disk) == ("", "")


@pytest.mark.parametrize(("text", "same"), [("  S1  X ", "S1 X"), ("S1\n", "S1"), ("a\x1b[31mb", "a [31mb")])
def test_a_word_is_compared_without_padding_and_control_characters(text, same):
    assert normal(text) == same
