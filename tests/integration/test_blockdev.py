"""Targets on real devices: loops, partitions, btrfs of two; and the kernel's own answer about over-mounts."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from contextlib import ExitStack
from textwrap import dedent

import pytest

from snapmgr.system import blockdev
from snapmgr.system.blockdev import backing_file, find_target
from snapmgr.system.command import CommandRunner
from support.storage import loop_filesystem, shielded, work_folder

MIB = 1024**2
RUN = CommandRunner()


def isolated(script: str, folder) -> str:
    """Run Python in a mount namespace of its own, so that whatever it mounts ends with it; return what it printed."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.needs("root", "loop", "xfs", "ext4")
@pytest.mark.parametrize(("fs_type", "size_bytes"), [("ext4", 16 * MIB), ("xfs", 320 * MIB)])
def test_a_file_system_on_a_loop_device(fs_type, size_bytes):
    with loop_filesystem(fs_type, size_bytes) as made:
        inner = made.point / "data dir"
        inner.mkdir()
        target = find_target(str(inner))
        assert (target.path, target.mount.point, target.submounts) == (str(inner), str(made.point), ())
        (device,) = target.devices
        assert (device.path, device.kind, device.below) == (made.device, "loop", ())
        assert device.size_bytes == size_bytes
        assert backing_file(device) == str(made.image)
        expected = RUN.run(["blkid", "-p", "-s", "UUID", "-o", "value", made.device]).stdout.strip()
        assert (device.fs_type, device.fs_uuid) == (fs_type, expected)
        status = os.stat(inner)
        assert target.mount.device == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"


@pytest.mark.needs("root", "loop", "btrfs")
def test_a_btrfs_of_two_devices_seen_from_a_subvolume(monkeypatch):
    with ExitStack() as stack:
        made = stack.enter_context(loop_filesystem("btrfs", 200 * MIB))
        folder = stack.enter_context(work_folder())
        second = folder / "second"
        with second.open("wb") as file:
            file.truncate(200 * MIB)
        with shielded():
            extra = RUN.run(["losetup", "--find", "--show", str(second)]).stdout.strip()
            stack.callback(RUN.run, ["losetup", "--detach", extra])
        RUN.run(["btrfs", "device", "add", "-f", extra, str(made.point)])
        # Else the second would still be in use when it is detached.
        stack.callback(RUN.run, ["btrfs", "device", "remove", extra, str(made.point)])
        subvolume = made.point / "@mysql"
        RUN.run(["btrfs", "subvolume", "create", str(subvolume)])
        target = find_target(str(subvolume))
        assert sorted(device.path for device in target.devices) == sorted([made.device, extra])
        uuid = RUN.run(["blkid", "-p", "-s", "UUID", "-o", "value", made.device]).stdout.strip()
        assert {(device.fs_type, device.fs_uuid) for device in target.devices} == {("btrfs", uuid)}
        # A user who may not open the folder cannot ask the file system itself.
        with monkeypatch.context() as patch:
            patch.setattr(blockdev.fcntl, "ioctl", _refuse)
            assert find_target(str(subvolume)) == target


def _refuse(*_):
    raise PermissionError


@pytest.mark.needs("root", "loop", "btrfs")
def test_a_subvolume_mounted_elsewhere_and_nested_mounts():
    with loop_filesystem("btrfs", 200 * MIB) as made, work_folder() as folder:
        RUN.run(["btrfs", "subvolume", "create", f"{made.point}/@mysql"])
        output = isolated(
            f"""
            import os, sys
            from snapmgr.system.blockdev import find_target
            from snapmgr.system.command import CommandRunner
            run = CommandRunner().run
            odd = sys.argv[1] + "/odd\\tna\\\\me\\nx é"
            os.mkdir(odd)
            run(["mount", "-o", "subvol=@mysql", "{made.device}", odd])
            for name in ("inner", "inner/twice", "bind", "plain"):
                os.makedirs(f"{{odd}}/{{name}}", exist_ok=True)
            run(["mount", "-t", "tmpfs", "hidden", f"{{odd}}/inner/twice"])
            run(["mount", "-t", "tmpfs", "first", f"{{odd}}/inner"])
            run(["mount", "-t", "tmpfs", "second", f"{{odd}}/inner"])
            run(["mount", "--bind", f"{{odd}}/plain", f"{{odd}}/bind"])
            target = find_target(odd)
            assert target.path == odd and target.mount.point == odd, target
            assert target.mount.root == "/@mysql" and target.devices[0].path == "{made.device}", target
            print(sorted((os.path.basename(one.point), one.source) for one in target.submounts))
            bound = find_target(f"{{odd}}/bind")
            print(bound.mount.root, bound.devices == target.devices)
            """,
            folder,
        )
        assert output.splitlines() == [
            str([("bind", made.device), ("inner", "second")]),
            "/@mysql/plain True",
        ]


@pytest.mark.needs("root", "loop", "ext4")
def test_a_file_system_on_a_partition_of_a_loop_device():
    with work_folder() as folder:
        image = folder / "disk"
        # One primary partition from sector 2048: 16 MiB.
        entry = struct.pack("<B3sB3sII", 0, b"\0\2\0", 0x83, b"\xff\xff\xff", 2048, 32768)
        with image.open("wb") as file:
            file.truncate(20 * MIB)
            file.write((b"\0" * 446 + entry).ljust(510, b"\0") + b"\x55\xaa")
        with ExitStack() as stack:
            with shielded():
                disk = RUN.run(["losetup", "--find", "--show", "--partscan", str(image)]).stdout.strip()
                stack.callback(RUN.run, ["losetup", "--detach", disk])
            if not os.path.exists(f"{disk}p1"):
                # A kernel that reads no such partition tables takes the partitions from partx.
                RUN.run(["partx", "--add", disk])
                stack.callback(RUN.run, ["partx", "--delete", disk])
            RUN.run(["mkfs.ext4", "-q", "-F", f"{disk}p1"])
            point = folder / "mnt"
            point.mkdir()
            with shielded():
                RUN.run(["mount", f"{disk}p1", str(point)])
                stack.callback(RUN.run, ["umount", str(point)])
            (partition,) = find_target(str(point)).devices
            assert (partition.path, partition.kind, partition.size_bytes) == (f"{disk}p1", "part", 16 * MIB)
            assert [(lower.path, lower.kind) for lower in partition.below] == [(disk, "loop")]
            assert partition.fs_uuid is not None


@pytest.mark.needs("root")
def test_the_walk_of_the_table_agrees_with_the_kernel():
    """Overlapping mounts of all kinds, then for every folder: our walk against the mount that the kernel reports."""
    with work_folder() as folder:
        output = isolated(
            """
            import os, sys
            from snapmgr.system.blockdev import MountTree, mount_id_of, read_mounts
            from snapmgr.system.command import CommandRunner
            run = CommandRunner().run
            base = sys.argv[1] + "/t"
            os.makedirs(base)
            tmpfs = lambda path: (os.makedirs(path, exist_ok=True), run(["mount", "-t", "tmpfs", "t", path]))
            bind = lambda source, path, *more: (
                os.makedirs(source, exist_ok=True), os.makedirs(path, exist_ok=True),
                run(["mount", *more, "--bind", source, path]))
            tmpfs(base)
            for name in ("a", "a/b", "a/b/c", "a b", "a\\nb", "deep/er/still"):
                tmpfs(f"{base}/{name}")
            # Over what is mounted already, at its root, above it and beside it.
            tmpfs(f"{base}/a")
            os.makedirs(f"{base}/a/b/c/d")
            tmpfs(f"{base}/a/b")
            tmpfs(f"{base}/deep")
            os.makedirs(f"{base}/deep/er/still")
            bind(f"{base}/x/y", f"{base}/z")
            tmpfs(f"{base}/x/y")
            bind(f"{base}/x", f"{base}/w", "--make-private")
            run(["mount", "--rbind", f"{base}/a", f"{base}/z"])
            run(["mount", "--move", f"{base}/a b", f"{base}/x/y"])
            tmpfs("/mnt")
            run(["mount", "-t", "tmpfs", "t", "/"])
            table, checked, over = read_mounts(), 0, 0
            for path, folders, _ in os.walk("/"):
                if path.count("/") > 12 or path.startswith(("/proc/", "/sys/", "/dev/", "/usr", "/var", "/root")):
                    folders.clear()
                    continue
                descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
                real = mount_id_of(descriptor)
                os.close(descriptor)
                found = MountTree(table).find(path)
                assert found.id == real, (path, found, real)
                checked += 1
                over += path.startswith(base)
            assert over >= 12, over
            print("agreed", checked > over)
            """,
            folder,
        )
    assert output == "agreed True\n"


@pytest.mark.needs("root", "loop", "ext4")
def test_udevs_database_is_believed_where_it_fits_and_only_there():
    """udevd's files are made by hand in a namespace of our own; libudev itself reads them."""
    with loop_filesystem("ext4", 16 * MIB) as made, work_folder() as folder:
        output = isolated(
            f"""
            import json, os
            from snapmgr.system.blockdev import find_target
            from snapmgr.system.command import CommandRunner
            os.makedirs("/run/udev", exist_ok=True)
            CommandRunner().run(["mount", "-t", "tmpfs", "udev", "/run/udev"])
            os.mkdir("/run/udev/data")
            number = find_target("{made.point}").devices[0].number

            class Silent:
                def run(self, argv, **_):
                    from snapmgr.contract.errors import CommandError
                    raise CommandError(argv[0])

            seen = []
            for kind in ("ext4", "xfs", None):
                with open(f"/run/udev/data/b{{number}}", "w") as record:
                    record.write("I:1\\nE:ID_FS_UUID=from-udev\\n" + (f"E:ID_FS_TYPE={{kind}}\\n" if kind else ""))
                device = find_target("{made.point}", runner=Silent()).devices[0]
                seen.append([device.fs_type, device.fs_uuid])
            print(json.dumps(seen))
            """,
            folder,
        )
    # A record of XFS on a mounted ext4 is stale, and so is its UUID.
    assert json.loads(output) == [["ext4", "from-udev"], ["ext4", None], ["ext4", None]]
