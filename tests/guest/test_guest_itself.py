"""The place where tests of LVM run: what guest-test refuses, and that a disk is blank again whatever was on it."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import lvm
from support.storage import work_folder

GUEST_TEST = Path(__file__).parents[2] / "vagrant" / "guest-test"


def guest_test(disk: str | None) -> subprocess.CompletedProcess[str]:
    """Run the script up to pytest's version."""
    environment = {name: value for name, value in os.environ.items() if name != "SNAPMGR_TEST_DEV"}
    if disk is not None:
        environment["SNAPMGR_TEST_DEV"] = disk
    return subprocess.run([GUEST_TEST, "--version"], env=environment, capture_output=True, text=True, check=False)


def refusal(disk: str | None) -> str:
    done = guest_test(disk)
    assert done.returncode == 7, done
    assert "pytest" not in done.stdout
    return done.stderr


def test_guest_test_refuses_a_disk_that_is_unset_or_none(tmp_path):
    assert "SNAPMGR_TEST_DEV is not set" in refusal(None)
    assert "SNAPMGR_TEST_DEV is not set" in refusal("")
    assert "is no block device" in refusal("/dev/does-not-exist")
    assert "is no block device" in refusal("/dev/null")
    (tmp_path / "image").write_bytes(bytes(1 << 20))
    assert "is no block device" in refusal(str(tmp_path / "image"))


def test_guest_test_refuses_a_disk_that_is_mounted_in_use_or_not_blank_and_takes_a_blank_one(disk):
    with lvm.partitions(disk, 2) as (part, other), work_folder() as folder:
        assert f"{disk} is in use by {part}, {other}" in refusal(disk)
        lvm.run("mkswap", part)
        assert f"{part} is not blank: swap" in refusal(part)
        lvm.run("mkfs.ext4", "-q", "-F", part)
        assert f"{part} is not blank: ext4" in refusal(part)
        lvm.run("mount", part, folder)
        assert f"{part}, or something on it, is mounted: {folder}" in refusal(part)
        assert f"{disk}, or something on it, is mounted: {folder}" in refusal(disk)
        lvm.run("umount", folder)

        lvm.run("vgcreate", "--yes", "foreign", part)
        assert f"{part} is not blank: LVM2_member" in refusal(part)
        lvm.run("lvcreate", "--yes", "--size", "8m", "--name", "a", "foreign")
        assert f"{part} is in use by /dev/mapper/foreign-a" in refusal(part)
        lvm.wipe(part)

        # No signature: a database's raw disk, perhaps.
        Path(part).write_bytes(b"something")
        assert f"{part} is not blank: there is something in its first MiB" in refusal(part)
        lvm.wipe(part)
        # Only the kernel knows of this one.
        fd = os.open(part, os.O_RDWR | os.O_EXCL)
        assert f"{part} is in use" in refusal(part)
        os.close(fd)
        done = guest_test(part)
        assert done.returncode == 0, done
        assert done.stdout.startswith("pytest")


def leave_things_and_fail(disk, folder):
    """Stack volumes on LUKS on MD on partitions, a dm-snapshot above, mounted; two are suspended when it fails."""
    with ExitStack() as stack:
        parts = stack.enter_context(lvm.partitions(disk, 3))
        opened = stack.enter_context(lvm.luks(stack.enter_context(lvm.mirror(parts[:2]))))
        group = stack.enter_context(lvm.volume_group([opened, parts[2]]))
        group.pool(data_mib=512)
        thin, classic = group.thin_origin(), group.classic_origin(size_mib=128)
        lvm.run("lvcreate", "--yes", "--snapshot", "--size", "16m", "--name", "snap", f"{group.name}/{classic.lv}")
        # Its file lies on the other volume.
        image = thin.point / "image"
        image.touch()
        os.truncate(image, 64 << 20)
        loop = lvm.run("losetup", "--find", "--show", image).strip()
        table = f"0 {(128 << 20) // 512} snapshot {group.device('snap')} {loop} N 8"
        lvm.run("dmsetup", "create", "scratch", "--table", table)
        lvm.run("mount", "/dev/mapper/scratch", folder)
        above = lvm.stack_above(disk)
        names = [lvm.mapped_name(name) or name for name in above]
        for upper, lower in (
            ("scratch", "vgtest-snap"),
            ("scratch", Path(loop).name),
            (Path(loop).name, "vgtest-thin"),
        ):
            assert names.index(upper) < names.index(lower), names
        lvm.run("dmsetup", "suspend", f"{group.name}-{classic.lv}")
        lvm.run("dmsetup", "suspend", "--noflush", "scratch")
        raise RuntimeError("the test failed")


def test_a_disk_is_blank_again_with_whatever_a_test_left_on_it(disk):
    with work_folder() as folder, pytest.raises(RuntimeError, match="the test failed"):
        leave_things_and_fail(disk, folder)
    assert lvm.stack_above(disk) == []
    assert not Path("/dev/vgtest").exists()
    assert lvm.report("vgs") == []
    assert lvm.run("wipefs", "--noheadings", disk) == ""


def test_each_test_gets_the_volume_group_empty(vg):
    for _ in range(2):
        assert vg.names() == []
        vg.pool()
        assert vg.thin_origin().pool == "pool"
        assert vg.classic_origin().point.is_mount()
        assert vg.names() == ["origin", "pool", "thin"]
        vg.clear()
