"""What the LVM backend makes of what LVM printed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from snapmgr.api import StorageError
from snapmgr.contract.errors import CommandError
from snapmgr.contract.records import BlockDevice, Completed, Mount, Pool, Target
from snapmgr_lvm import gauges, inventory
from snapmgr_lvm.config import LvmConfig
from snapmgr_lvm.locating import locate
from snapmgr_lvm.report import hyphenate, parse_report, read_group

RECORDED = (Path(__file__).parent / "lvm/lvs.json").read_text()
POOL = Pool(backend="lvm", id="BOgRkl-Ip33-ViQP-WVNA-cSeH-LChL-v9NDJV", hint="vg0")


class Replay:
    """Answers each program with a text, or fails."""

    def __init__(self, **answers: str | Exception) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Any, **_options: Any) -> Completed:
        self.asked.append(tuple(argv))
        answer = self.answers[argv[0]]
        if isinstance(answer, Exception):
            raise answer
        return Completed(argv=tuple(argv), returncode=0, stdout=answer, stderr="")


def group(text: str = RECORDED):
    return read_group(Replay(lvs=text), POOL)


def test_a_volume_group_with_both_kinds_of_snapshots():
    vg = group()
    assert (vg.name, vg.uuid, vg.missing_pvs, vg.exported, vg.writable) == ("vg0", POOL.id, 0, False, True)
    assert (vg.size_bytes, vg.free_bytes, vg.extent_bytes) == (8585740288, 8287944704, 4 << 20)
    origin, lost = vg.by_name("data-1"), vg.by_name("lost")
    classic, thin, pool = (vg.by_name(name) for name in ("snapmgr.shop.1", "snapmgr.shop.2", "pool"))
    assert {origin.segtype, classic.segtype, thin.segtype, pool.segtype} == {"linear", "thin", "thin-pool"}
    assert [volume.is_classic_snapshot for volume in (origin, lost, classic, thin, pool)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert classic.origin_uuid == lost.origin_uuid == origin.uuid
    assert thin.origin_uuid == vg.by_name("thin").uuid
    assert thin.pool_uuid == pool.uuid
    assert (classic.size_bytes, classic.chunk_bytes, classic.snap_percent, classic.invalid) == (
        8 << 20,
        16384,
        87.89,
        False,
    )
    assert (lost.snap_percent, lost.invalid) == (100.0, True)
    assert (thin.active, thin.device, thin.skip_activation, thin.writable) == (False, None, True, False)
    assert (origin.active, origin.writable, origin.suspended, origin.opened) == (True, True, False, False)
    assert re.fullmatch(r"254:\d+", origin.device)
    assert (pool.data_percent, pool.metadata_bytes, pool.when_full, pool.check_needed) == (0.0, 4 << 20, "queue", False)
    assert vg.by_name("pool_tdata") is not None
    assert origin.tags == frozenset()
    assert classic.tags == {"snapmgr", "snapmgr.id=shop.1", "snapmgr.state=made"}


def test_what_is_ours_by_its_tags():
    # Recorded without the origin's tag: that is no mark of ours.
    assert [(one.kind, one.name) for one in inventory.read(group())] == [("debris", "snapmgr.shop.1")]
    vg = group()
    marked = RECORDED.replace("snapmgr.id=shop.1,", f"snapmgr.id=shop.1,snapmgr.origin={vg.by_name('data-1').uuid},")
    marked = marked.replace("snapmgr.id=shop.2", f"snapmgr.id=shop.2,snapmgr.origin={vg.by_name('thin').uuid}")
    found = list(inventory.read(group(marked)))
    assert [(one.kind, one.name, one.snapshot_id) for one in found] == [
        ("snapshot", "snapmgr.shop.1", "shop.1"),
        ("snapshot", "snapmgr.shop.2", "shop.2"),
    ]
    assert found[0].ref.native_id == vg.by_name("snapmgr.shop.1").uuid
    (table,) = [one for one in gauges.of_group(group(marked)) if one.ref is not None]
    assert (table.size_bytes, round(table.used_bytes / table.size_bytes, 4), table.valid) == (8 << 20, 0.8789, True)


def test_a_group_that_is_not_there_and_an_lvm_that_does_not_answer():
    empty = '{"report": [{"lv": []}]}'
    with pytest.raises(StorageError, match="vg0 .* is not there"):
        read_group(Replay(lvs=empty, vgs='{"report": [{"vg": []}]}'), POOL)
    with pytest.raises(StorageError, match="LVM does not answer"):
        read_group(Replay(lvs=CommandError("lvs did not finish within 60 s")), POOL)
    with pytest.raises(StorageError, match="something unexpected"):
        read_group(Replay(lvs="  LV   VG  Attr"), POOL)
    runner = Replay()
    with pytest.raises(StorageError, match="is not the UUID"):
        read_group(runner, Pool(backend="lvm", id='" || lv_name=~".*', hint="vg0"))
    assert runner.asked == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"report": [{}]}', '{"report": 1}', "null"])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(StorageError):
        parse_report(text, "lv")


def test_device_mappers_uuids_are_lvms_without_hyphens():
    assert hyphenate("BOgRklIp33ViQPWVNAcSeHLChLv9NDJV") == POOL.id


@pytest.mark.parametrize(
    ("name", "kind", "label"),
    [
        ("data-1", "auto", "vg0/data-1 (classic snapshot)"),
        ("thin", "auto", "vg0/thin (thin snapshot)"),
        ("thin", "classic", "vg0/thin (classic snapshot)"),
    ],
)
def test_people_are_shown_the_volumes_name_and_which_kind_of_snapshot_it_gets(name: str, kind: Any, label: str):
    found = locate(Replay(lvs=RECORDED), LvmConfig(kind=kind), on_volume(name))
    assert (found.id, found.shown) == (group().by_name(name).uuid, label)


def test_a_scratch_folder_on_the_volume_is_warned_of_where_it_would_be_used(tmp_path: Path):
    there = os.stat(tmp_path).st_dev
    number = f"{os.major(there)}:{os.minor(there)}"
    config = LvmConfig(scratch_dir=str(tmp_path / "not/there"))
    (warning,) = locate(Replay(lvs=RECORDED), config, on_volume("data-1", number)).warnings
    assert "cannot be mounted" in warning
    assert "scratch_dir" in warning
    assert locate(Replay(lvs=RECORDED), config, on_volume("data-1", "254:77")).warnings == ()
    assert locate(Replay(lvs=RECORDED), config, on_volume("thin", number)).warnings == ()


def on_volume(name: str, number: str = "254:77") -> Target:
    """Return a folder on a volume of the recorded group."""
    uuid = group().by_name(name).uuid
    device = BlockDevice(
        name="dm-0",
        path=f"/dev/mapper/vg0-{name}",
        number=number,
        kind="lvm",
        size_bytes=1 << 30,
        dm_uuid="LVM-" + (POOL.id + uuid).replace("-", ""),
    )
    mount = Mount(id=1, parent_id=0, device=number, root="/", point="/d", source=device.path, fs_type="xfs")
    return Target(path="/d", mount=mount, devices=(device,))
