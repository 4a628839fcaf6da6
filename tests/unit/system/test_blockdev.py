"""The mount table and the walk to a path's mount; devices are in the golden and integration tiers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotFoundError, StorageError
from snapmgr.contract.records import Mount
from snapmgr.system.blockdev import MountTree, find_target, parse_mountinfo, read_mounts


def escape(name: bytes, also: bytes = b"") -> bytes:
    """Escape as the kernel's mangle() and seq_show_option() do."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" + also else bytes([byte]) for byte in name)


def line(mount: Mount, *, optional: tuple[str, ...] = ()) -> bytes:
    """Write a mount as the kernel would."""
    left = [
        b"%d" % mount.id,
        b"%d" % mount.parent_id,
        mount.device.encode(),
        escape(os.fsencode(mount.root)),
        escape(os.fsencode(mount.point)),
        b",".join(os.fsencode(option) for option in mount.options),
        *(field.encode() for field in optional),
    ]
    # A comma within an option is escaped by the file system that prints it.
    shown = b",".join(escape(os.fsencode(option), b",") for option in mount.super_options)
    right = [escape(os.fsencode(mount.fs_type)), escape(os.fsencode(mount.source)), shown]
    return b" ".join(left) + b" - " + b" ".join(right) + b"\n"


def mount(number, parent, point, *, device="0:1", source="x"):
    return Mount(id=number, parent_id=parent, device=device, root="/", point=point, fs_type="t", source=source)


# Any bytes but NUL: a file's name may be no UTF-8, and hold every kind of white space.
names = st.binary(min_size=0, max_size=12).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
options = st.lists(st.sampled_from(["rw", "ro", "noatime", "nosuid"]), min_size=1, max_size=3).map(tuple)
mounts = st.builds(
    Mount,
    id=st.integers(min_value=0, max_value=2**31),
    parent_id=st.integers(min_value=0, max_value=2**31),
    device=st.tuples(st.integers(0, 4095), st.integers(0, 2**20)).map(lambda pair: f"{pair[0]}:{pair[1]}"),
    root=names.map("/{}".format),
    point=names.map("/{}".format),
    fs_type=st.sampled_from(["ext4", "btrfs", "fuse.juicefs", "nfs4"]),
    source=names,
    options=options,
    super_options=st.lists(names.filter(bool), max_size=3).map(tuple),
)
optional_fields = st.lists(st.sampled_from(["shared:1", "master:22", "propagate_from:3", "unbindable"]), max_size=3)


@given(st.lists(st.tuples(mounts, optional_fields.map(tuple)), max_size=5))
def test_what_the_kernel_escapes_is_read_back(table):
    data = b"".join(line(mount, optional=optional) for mount, optional in table)
    assert parse_mountinfo(data) == tuple(mount for mount, _ in table)


def test_a_juicefs_mount_is_read():
    (found,) = parse_mountinfo(b"42 27 0:39 / /mnt rw,relatime - fuse.juicefs JuiceFS:vol1 rw,user_id=0,group_id=0\n")
    assert found == Mount(
        id=42,
        parent_id=27,
        device="0:39",
        root="/",
        point="/mnt",
        fs_type="fuse.juicefs",
        source="JuiceFS:vol1",
        options=("rw", "relatime"),
        super_options=("rw", "user_id=0", "group_id=0"),
    )


def test_an_empty_source_and_a_dash_as_a_source_are_read():
    empty, dash = parse_mountinfo(b"1 0 0:1 / / rw - tmpfs  rw\n2 1 0:2 / /- rw shared:1 - tmpfs - rw\n")
    assert (empty.source, empty.super_options) == ("", ("rw",))
    assert (dash.point, dash.source) == ("/-", "-")


@pytest.mark.parametrize(
    "data", [b"nonsense\n", b"1 0 0:1 / / rw\n", b"1 0 0:1 / / rw - ext4\n", b"x 0 0:1 / / rw - a b c\n"]
)
def test_a_line_that_is_none_is_an_error_with_the_line(data):
    with pytest.raises(StorageError) as caught:
        parse_mountinfo(data)
    assert repr(data.decode().strip()) in caught.value.message


def test_a_mount_table_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        read_mounts(str(tmp_path / "none"))


def test_this_machines_table_is_read():
    found = read_mounts()
    assert len({mount.id for mount in found}) == len(found)
    assert MountTree(found).find("/proc/self").fs_type == "proc"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/", 1),
        ("/srv", 1),
        ("/srv/a", 2),
        ("/srv/a/", 2),
        ("/srv/ab", 1),
        ("/srv/a/b/c/d", 4),
        # The mount at /srv/a/b lies under the one that was put over /srv/a later.
        ("/srv/over/b", 6),
        ("/proc/1", 7),
    ],
)
def test_the_mount_of_a_path(path, number):
    table = [
        mount(1, 0, "/"),
        mount(7, 1, "/proc"),
        mount(2, 1, "/srv/a"),
        mount(3, 2, "/srv/a/b"),
        mount(4, 3, "/srv/a/b"),
        mount(5, 1, "/srv/over"),
        mount(8, 5, "/srv/over/b"),
        mount(6, 5, "/srv/over"),
    ]
    assert MountTree(table).find(path).id == number


def test_what_was_mounted_over_the_root_later_is_not_entered():
    assert MountTree([mount(1, 0, "/"), mount(2, 1, "/")]).find("/srv").id == 1
    # … but what is at the root of it all is, where the process's own root is listed second (no pivot_root).
    assert MountTree([mount(1, 1, "/"), mount(2, 1, "/srv")]).find("/srv").id == 2


def test_of_two_at_one_place_the_later_lies_on_top():
    # Old kernels made such "side mounts" by propagation.
    assert MountTree([mount(1, 0, "/"), mount(2, 1, "/a"), mount(3, 1, "/a")]).find("/a/b").id == 3


def test_a_chroot_without_a_mount_of_its_own_is_an_error():
    table = [mount(5, 1, "/proc"), mount(6, 5, "/proc/sys")]
    assert MountTree(table).find("/proc/sys/kernel").id == 6
    with pytest.raises(NotFoundError, match="no mount holds /srv"):
        MountTree(table).find("/srv")


def test_what_is_not_a_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (
        "relative/path",
        "",
        f"{tmp_path}/nul\0",
        f"{tmp_path}/file",
        f"{tmp_path}/loop",
        f"{tmp_path}/file/x",
    ):
        with pytest.raises(ConfigError) as caught:
            find_target(path)
        assert caught.value.hint
    for path in (f"{tmp_path}/none", f"{tmp_path}/dangling"):
        with pytest.raises(NotFoundError, match="does not exist"):
            find_target(path)


def test_symlinks_are_resolved(tmp_path):
    real = tmp_path / "real dir"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    target = find_target(f"{tmp_path}/link/../link/.")
    assert target.path == str(real)
    assert target.mount == MountTree(read_mounts()).find(str(real))


def test_a_folder_that_may_not_be_entered_is_a_lacking_right(tmp_path):
    (tmp_path / "closed/inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    was = os.geteuid()
    try:
        if was == 0:
            # Root may enter anything; as somebody else already pytest's own folder is closed.
            os.seteuid(65534)
        with pytest.raises(MissingRequirementError, match="permission denied"):
            find_target(f"{tmp_path}/closed/inner")
    finally:
        os.seteuid(was)
        (tmp_path / "closed").chmod(0o700)


def test_file_systems_without_devices_have_none():
    target = find_target("/proc/sys")
    assert (target.mount.fs_type, target.devices) == ("proc", ())


def test_importing_it_is_cheap():
    code = "import sys, snapmgr.system.blockdev; print({'pyudev', 'subprocess'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
