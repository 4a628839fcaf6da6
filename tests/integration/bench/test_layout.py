"""Layouts of files on real file systems, beside what filefrag says."""

from __future__ import annotations

import os
import random
import re
import subprocess

import pytest

from snapmgr.bench.measure.counters import Counters
from snapmgr.bench.measure.layout import read_layout
from support.storage import loop_filesystem

_MIB = 1 << 20
_SIZES = {"btrfs": 256 * _MIB, "xfs": 320 * _MIB, "ext4": 128 * _MIB}
_FILE_BYTES = 24 * _MIB


def _filefrag(path):
    done = subprocess.run(["filefrag", "-v", path], check=True, capture_output=True, text=True)
    return int(re.search(r": (\d+) extents? found", done.stdout)[1]), done.stdout


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs("root", "loop", name)) for name in _SIZES])
def file_system(request):
    with loop_filesystem(request.param, _SIZES[request.param], base="/dev/shm") as made:
        yield made


def _written(path, *, block=4096):
    dice = random.Random(5)
    with path.open("wb", buffering=0) as file:
        for _ in range(_FILE_BYTES // _MIB):
            file.write(dice.randbytes(_MIB))
        os.fsync(file.fileno())
        for number in dice.sample(range(_FILE_BYTES // block), 300):
            os.pwrite(file.fileno(), dice.randbytes(block), number * block)
            # Of what is dirty together btrfs makes one extent.
            if number % 7 == 0:
                os.fdatasync(file.fileno())
    return path


def _holey(path):
    with path.open("wb", buffering=0) as file:
        for number in range(120):
            os.pwrite(file.fileno(), b"x" * 4096, number * 3 * 4096)
        os.posix_fallocate(file.fileno(), 4 * _MIB, 4 * _MIB)
    return path


def _in_memory_still(path):
    path.write_bytes(random.Random(6).randbytes(3 * _MIB))
    return path


@pytest.mark.parametrize("made", [_written, _holey, _in_memory_still])
def test_extents_are_those_of_filefrag(file_system, made):
    path = made(file_system.point / "file")
    found = read_layout(path)
    count, said = _filefrag(path)
    assert found.extents == count, said
    assert not any(one < 0 for run in found.runs for one in run)
    assert found.size_bytes == path.stat().st_size
    if made is _holey:
        assert found.mapped_bytes - found.unwritten_bytes == 120 * 4096
        # XFS reserves a little more than it is asked for.
        assert 4 * _MIB <= found.unwritten_bytes < 5 * _MIB
    else:
        assert found.mapped_bytes == found.size_bytes
        assert (found.gaps > 100) == (made is _written and file_system.fs_type == "btrfs")


@pytest.mark.needs("root", "loop", "btrfs")
def test_compressed_file_is_many_extents_and_few_jumps():
    with loop_filesystem("btrfs", _SIZES["btrfs"], mount_options=["compress-force=zstd"], base="/dev/shm") as made:
        path = made.point / "file"
        path.write_bytes(b"".join(b"%d " % number for number in range(2_000_000)))
        found = read_layout(path)
        assert found.encoded == found.extents > 60
        assert found.extents == _filefrag(path)[0]
        assert found.gaps < 10


@pytest.mark.needs("root", "loop", "xfs")
def test_device_counts_what_was_written_and_read_past_the_caches():
    with loop_filesystem("xfs", _SIZES["xfs"], base="/dev/shm") as made:
        subprocess.run(["sync", "--file-system", made.point], check=True)
        counters = Counters([made.device])
        path = made.point / "file"
        with counters.measured() as part, path.open("wb", buffering=0) as file:
            file.write(os.urandom(8 * _MIB))
            os.fsync(file.fileno())
        assert 8 * _MIB <= part.spent.written_bytes < 9 * _MIB
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with counters.measured() as part:
                while file.read(_MIB):
                    pass
        assert 8 * _MIB <= part.spent.read_bytes < 9 * _MIB
        assert part.spent.written_bytes < _MIB
