"""Facts about real devices: a loop device with the file system and the disk below it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snapmgr.bench.device.hostfacts import device_facts, host_facts
from snapmgr.bench.device.target import opened_target
from support.storage import loop_filesystem

MIB = 1 << 20


@pytest.mark.needs("root", "loop", "xfs")
def test_a_loop_device_tells_what_it_lies_on_and_no_path():
    with (
        loop_filesystem("xfs", 600 * MIB, base=Path("/dev/shm")) as below,
        opened_target(f"loop:128M:{below.point}", size_bytes=None, wipe=None, written=False) as target,
    ):
        facts = device_facts(target.device)
        text = json.dumps(facts)
    assert (facts["kind"], facts["size_bytes"], facts["logical_block_bytes"]) == ("loop", 128 * MIB, 512)
    assert facts["loop"]["file_system"] == "xfs"
    assert facts["loop"]["direct_io"] is True
    assert "rw" in facts["loop"]["mount_options"]
    (lower,) = facts["loop"]["on"]
    assert (lower["kind"], lower["loop"]["file_system"]) == ("loop", "tmpfs")
    assert str(below.point.parent) not in text


@pytest.mark.needs("root", "loop", "ext4")
def test_all_facts_of_a_loop_device_are_json():
    with loop_filesystem("ext4", 16 * MIB, base=Path("/dev/shm")) as made:
        facts = json.loads(json.dumps(host_facts(made.device)))
    assert facts["device"]["loop"]["direct_io"] is False
    assert facts["device"]["rotational"] in (True, False)
    assert facts["tools"]["mkfs.ext4"].startswith("1.")
