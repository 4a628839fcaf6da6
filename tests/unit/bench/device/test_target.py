"""What --on means, and what is refused before any device is opened."""

from __future__ import annotations

import os

import pytest

from snapmgr.bench.device import blockdevice, loopfile
from snapmgr.bench.device.loopfile import require_room
from snapmgr.bench.device.target import DEFAULT_FOLDER, TargetSpec, opened_target, parse_target, preview_target
from snapmgr.contract.errors import ConfigError, MissingRequirementError

MIB = 1 << 20
GIB = 1 << 30


def test_loop_with_and_without_a_folder(tmp_path):
    assert parse_target("loop:1.5G", folder=str(tmp_path)) == TargetSpec(
        kind="loop", path=str(tmp_path), size_bytes=1536 * MIB
    )
    assert parse_target(f"loop:512M:{tmp_path}").path == str(tmp_path)
    assert parse_target("loop:1G").path == os.path.realpath(DEFAULT_FOLDER)
    odd = tmp_path / "with:colon"
    odd.mkdir()
    assert parse_target(f"loop:512M:{odd}").path == str(odd)


def test_a_folder_gets_the_size_that_is_needed(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    expected = TargetSpec(kind="loop", path=str(tmp_path), size_bytes=GIB + MIB)
    assert parse_target(str(link), size_bytes=GIB + 5) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("loop:", "is not a size"),
        ("loop:4X", "is not a size"),
        ("loop:-4G", "is not a size"),
        ("loop:1G:/no/such/folder", "is not a folder"),
        ("loop:100M", "too small"),
        ("loop:2G", "4.0 GiB are needed"),
        ("/no/such/device", "no such file"),
        ("/dev/null", "neither a block device nor a folder"),
        ("/etc/passwd", "neither a block device nor a folder"),
        ("a\0b", "null"),
    ],
)
def test_what_cannot_be_meant_is_bad_input_with_what_to_write(text, why):
    with pytest.raises(ConfigError, match=why) as raised:
        parse_target(text, size_bytes=4 * GIB)
    assert raised.value.exit_code == 2
    assert raised.value.hint


def test_a_folder_without_a_size_is_asked_for_one(tmp_path):
    with pytest.raises(ConfigError, match="size of the file is missing") as raised:
        parse_target(str(tmp_path))
    assert f"loop:SIZE:{tmp_path}" in raised.value.hint


def test_a_file_that_does_not_fit_is_refused_with_both_sizes(tmp_path):
    with pytest.raises(ConfigError, match=r"no space for a file of 1\.0 EiB: .* are free in .*must stay free"):
        preview_target(f"loop:1E:{tmp_path}", size_bytes=None, wipe=None)


def test_a_margin_stays_free(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    free = real.f_bavail * real.f_frsize
    monkeypatch.setattr(loopfile, "_available_memory", lambda: 1 << 60)
    with pytest.raises(ConfigError, match="no space"):
        require_room(tmp_path, free - 10 * MIB)


def test_memory_behind_a_folder_is_not_filled_up(tmp_path, monkeypatch):
    monkeypatch.setattr(loopfile, "_IN_MEMORY", (require_room(tmp_path, MIB),))
    monkeypatch.setattr(loopfile, "_available_memory", lambda: 300 * MIB)
    with pytest.raises(ConfigError, match=r"300\.0 MiB of memory are available"):
        require_room(tmp_path, 200 * MIB)


def test_only_root_formats(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(MissingRequirementError, match="needs root"),
        opened_target(f"loop:200M:{tmp_path}", size_bytes=None, wipe=None),
    ):
        pass


def test_root_is_not_told_to_be_root(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(blockdevice.os, "open", refuse)
    for user, hint in ((0, "you are root already"), (1000, "run it as root")):
        monkeypatch.setattr(blockdevice.os, "geteuid", lambda user=user: user)
        with pytest.raises(MissingRequirementError) as raised, blockdevice.claimed("/dev/vda"):
            pass
        assert hint in raised.value.hint
