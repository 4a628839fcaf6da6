"""The mark on a device counts for that very device and for what its run left, and for nothing else."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.bench.device.mark import MARK_BYTES, MIB, Mark, ours, pack, read_content, read_mark, unpack, usable_bytes

SIZE = 64 * MIB
MARK = Mark(identity="S1", size_bytes=SIZE, signatures=(("btrfs", "u-1"), ("LVM2_member", "u-2")))
LEFT = Mark(identity="S1", size_bytes=SIZE, content="d1")


def known(mark, *, identity="S1", size_bytes=SIZE, found=(), content="d1"):
    return ours(mark, identity=identity, size_bytes=size_bytes, found=found, content=content)


@pytest.mark.parametrize("mark", [MARK, LEFT])
def test_a_record_is_read_as_it_was_written(mark):
    assert len(pack(mark)) == MARK_BYTES
    assert unpack(pack(mark)) == mark


@given(at=st.integers(0, 200), flip=st.integers(1, 255))
def test_a_record_with_any_byte_changed_is_none(at, flip):
    data = bytearray(pack(LEFT))
    end = len(data.rstrip(b"\0"))
    data[at % end] ^= flip
    assert unpack(bytes(data)) is None


@given(st.binary(max_size=200))
def test_what_is_no_record_is_none(data):
    assert unpack(data) is None
    assert unpack(pack(LEFT)[:16] + data) is None


def test_more_than_a_record_holds_is_not_ours():
    many = tuple(("xfs", f"{number:036}") for number in range(40))
    mark = unpack(pack(replace(MARK, signatures=many)))
    assert known(mark, found=many[:16])
    assert not known(mark, found=many[:17])


def test_what_a_killed_run_had_made_is_ours():
    assert known(MARK, found=(("btrfs", "u-1"),))
    assert known(MARK, found=(("LVM2_member", "u-2"), ("btrfs", "u-1")))


@pytest.mark.parametrize(
    "found",
    [
        (("btrfs", "u-9"),),  # made by somebody after us
        (("ext4", "u-1"),),
        (("btrfs", "u-1"), ("ext4", "u-9")),
        (("btrfs", ""),),  # cannot be told from another's
        (("partition", ""),),
        (),  # its signature is gone and its data are there: by whom is not known
    ],
)
def test_anything_else_on_a_killed_runs_device_is_not(found):
    assert not known(MARK, found=found)


def test_a_signature_without_a_uuid_is_not_ours_even_if_it_is_noted():
    assert not known(replace(MARK, signatures=(("btrfs", ""),)), found=(("btrfs", ""),))


def test_what_a_run_left_at_its_end_is_ours_as_long_as_nobody_wrote():
    assert known(LEFT)
    assert not known(LEFT, content="d2")
    assert not known(LEFT, found=(("ext4", "u-3"),))


def test_a_mark_copied_to_another_disk_counts_for_nothing():
    assert not known(LEFT, identity="S2")
    assert not known(LEFT, size_bytes=SIZE + MIB)
    assert not known(replace(LEFT, identity=""), identity="")
    assert not known(None)


@pytest.mark.parametrize("size", [0, 512, MIB, MIB + 511, 2 * MIB, 100 * MIB + 4096, 1 << 44])
def test_the_mark_fits_behind_what_may_be_used(size):
    usable = usable_bytes(size)
    assert usable % MIB == 0
    assert usable <= 0 or MIB <= size - usable < 2 * MIB


@pytest.fixture(name="device")
def _device(tmp_path):
    """A sparse file stands for an empty device."""
    path = tmp_path / "device"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE + 5000)
    yield fd
    os.close(fd)


def test_the_content_of_an_empty_device_says_so_and_leaves_the_mark_out(device):
    size = SIZE + 5000
    empty = read_content(device, size)
    assert (empty.data_at, empty.shown) == (None, "")
    os.pwrite(device, pack(LEFT), usable_bytes(size))
    assert read_content(device, size) == empty
    assert read_mark(device, size) == LEFT
    os.pwrite(device, b"\xff" * MIB, 0)
    erased = read_content(device, size)
    assert erased.data_at is None
    assert erased.digest != empty.digest


@pytest.mark.parametrize("at", [0, 511, MIB - 1, MIB, 32 * MIB, SIZE - MIB - 1, SIZE + 4999])
def test_a_byte_at_either_end_or_a_piece_in_the_middle_is_data(device, at):
    size = SIZE + 5000
    empty = read_content(device, size)
    os.pwrite(device, b"x" * (1 if at in (0, 511, MIB - 1, SIZE + 4999) else MIB), at)
    content = read_content(device, size)
    assert content.data_at is not None
    assert content.digest != empty.digest
    assert "data without a signature" in content.shown


def test_a_byte_behind_the_mark_is_data(device):
    size = SIZE + 5000
    os.pwrite(device, b"x", usable_bytes(size) + MARK_BYTES)
    assert read_content(device, size).data_at is not None


def test_a_device_that_is_empty_has_nothing_to_format():
    assert [usable_bytes(size) for size in (0, 1, MIB, 2 * MIB - 1, 2 * MIB)] == [0, 0, 0, 0, MIB]
