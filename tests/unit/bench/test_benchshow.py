"""The first screen of `bench show`: the advice for each use, and one row for each storage."""

from __future__ import annotations

from datetime import UTC, datetime

from snapmgr.bench.device import blankdisks
from snapmgr.bench.device.blankdisks import blank_disks
from snapmgr.bench.report import document
from snapmgr.cli.benchshow import advice_lines
from snapmgr.contract.errors import ConfigError
from support.bench.samples import HOST, blogs, random_updates

PROMISED = {
    "btrfs": {"atomicity": "volume", "clone": "native", "survives_origin": True},
    "xfs-reflink": {"atomicity": "file", "clone": "native", "survives_origin": True},
    "lvm-thin+xfs": {"atomicity": "volume", "clone": "native", "survives_origin": False},
}
LOOP = {**HOST, "device": {"kind": "loop"}}


def lines(*samples, host=HOST):
    made = [{**one, "host": host, "guarantee": PROMISED.get(one["stack"])} for one in samples]
    return list(advice_lines(document(made, made_at=datetime(2026, 1, 1, tzinfo=UTC))["recommendation"]))


def cells(found, stack):
    line = next(line for line in found if line.startswith(stack))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_first_screen_says_what_to_use_what_to_avoid_what_is_equal_and_how_sure():
    found = lines(*random_updates())
    first = found[: found.index("")]
    assert first[0] == "For a database with snapshots: xfs-reflink."
    assert 'its process frozen during the copy (quiesce = "freeze-process")' in first[1]
    assert first[2] == "  Without freezing the server, the first in this order: lvm-thin+xfs."
    assert [line.split(":")[0].strip() for line in first[3:]] == ["avoid btrfs", "no difference", "how sure"]
    assert cells(found, "btrfs")[:3] == ["btrfs", "per volume", "short, or none"]
    assert cells(found, "xfs-reflink ")[1:3] == ["per file", "server frozen"]
    assert cells(found, "lvm-thin+xfs")[1] == "per volume, dies with origin"
    assert cells(found, "ext4") == ["ext4", "no snapshots", "-", "-", "1", "1"]
    # Reads are slower, so they cost more than 1, though fewer bytes a second are less than 1.
    writes, reads = (float(cell.split()[0]) for cell in cells(found, "btrfs")[4:6])
    assert writes > 1.8
    assert reads > 1.5


def test_on_a_loop_device_each_use_has_an_indicative_order():
    found = lines(*random_updates(), *blogs(), host=LOOP)
    leads = [line for line in found if line.startswith("Indicative, for ")]
    assert [line.split(": ", 1)[0] for line in leads] == [
        "Indicative, for a database with snapshots",
        "Indicative, for a server with many small files",
    ]
    assert leads[0].split(": ", 1)[1].startswith("1. xfs-reflink; 2. lvm-thin+xfs; 3. btrfs. ")
    assert found.count("  how sure: On a disk the order may be another one.") == 2


def test_a_difference_that_was_not_shown_is_marked_in_the_table():
    noisy = random_updates(noise=1.5)
    assert any(line.startswith("btrfs") and line.endswith("*") for line in lines(*noisy))


def test_disks_that_would_be_accepted_without_wipe_are_found(tmp_path, monkeypatch):
    for name in ("sda", "sdb", "loop0"):
        (tmp_path / name).mkdir()
        if name != "loop0":
            (tmp_path / name / "device").mkdir()

    def preview(path, *, size_bytes, wipe):
        assert (size_bytes, wipe) == (1 << 30, None)
        if path == "/dev/sda":
            raise ConfigError("/dev/sda is in use, and was not changed: it is mounted at /")
        return f"{path} (Example, 1 TiB)"

    monkeypatch.setattr(blankdisks, "preview_target", preview)
    assert blank_disks(needed_bytes=1 << 30, sysfs=tmp_path) == [("/dev/sdb", "/dev/sdb (Example, 1 TiB)")]
