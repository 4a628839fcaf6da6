"""How large CoW tables are made and enlarged, and what LVM's report says of what can run full."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.api import Completed, NotFoundError, Pool, SnapshotRef, StorageError
from snapmgr_lvm import arming, gauges, revert, sizing
from snapmgr_lvm.config import LvmConfig
from snapmgr_lvm.report import Group
from snapmgr_lvm.sizing import Writes, plan_cow, require_room, table_bytes, whole_table_bytes
from support.logicalvolumes import logical_volume

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL = Pool(backend="lvm", id="vg-uuid", hint="vg0")


def volume(name, size=10 * GIB, **fields):
    values = {"name": name, "uuid": f"uuid-{name}", "size_bytes": size, "writable": True, "opened": True}
    return logical_volume(**(values | fields))


def cow(name, percent, *, size=GIB, hours=10, **fields):
    at = NOW - timedelta(hours=hours)
    values = {
        "tags": frozenset({"snapmgr", f"snapmgr.id=job.{name}", "snapmgr.origin=uuid-db"}),
        "roles": frozenset({"public", "snapshot", "thicksnapshot"}),
        "chunk_bytes": 16 * KIB,
        "origin_name": "db",
        "origin_uuid": "uuid-db",
        "snap_percent": percent,
        "made_at": f"{at:%Y-%m-%d %H:%M:%S %z}",
    }
    return volume(name, size, **(values | fields))


def thin(name, **fields):
    tags = frozenset({"snapmgr", f"snapmgr.id=job.{name}", "snapmgr.origin=uuid-t"})
    return volume(name, segtype="thin", pool_uuid="uuid-pool", tags=tags, **fields)


def pool(data=50.0, metadata=10.0, **fields):
    sizes = {"data_percent": data, "metadata_percent": metadata, "metadata_bytes": 100 * MIB}
    return volume("pool", segtype="thin-pool", **(sizes | fields))


def group(*volumes, free=5 * GIB, extent=4 * MIB):
    return Group(
        name="vg0",
        uuid="vg-uuid",
        size_bytes=100 * GIB,
        free_bytes=free,
        extent_bytes=extent,
        metadata_free_bytes=MIB,
        missing_pvs=0,
        exported=False,
        writable=True,
        lock_type="",
        volumes=volumes,
    )


def plan(*snapshots, writes=None, origin=None, extent=4 * MIB, **config):
    origin = origin or volume("db")
    return plan_cow(LvmConfig(**config), group(origin, *snapshots, extent=extent), origin, writes=writes, now=NOW)


# ---- sizes


def test_a_table_for_the_whole_origin_is_as_large_as_lvm_makes_it():
    # Tried with LVM 2.03.16: `lvcreate -s -L 900m` of an origin of 64 MiB in chunks of 4 KiB "reduced" it to 68 MiB.
    assert whole_table_bytes(64 * MIB, 4 * KIB, 4 * MIB) == 68 * MIB
    assert whole_table_bytes(64 * MIB, 16 * KIB, 4 * MIB) == 68 * MIB


@given(st.integers(1, 2**45), st.sampled_from([1 << power for power in range(12, 20)]), st.integers(0, 10))
def test_a_table_has_room_for_its_header_its_exceptions_and_its_data(data, chunk, power):
    extent = MIB << power
    size = table_bytes(data, chunk, extent)
    assert size % extent == 0
    chunks = -(-data // chunk)
    exceptions = -(-chunks * 16 // chunk)
    need = (1 + exceptions + chunks) * chunk
    assert need <= size <= max(need, 3 * chunk) + extent


@given(st.integers(MIB, 2**44), st.integers(1, 4000), st.sampled_from(["4K", "16K", "512K"]))
def test_no_table_is_larger_than_the_whole_origin_needs(size, tenths, chunk):
    percent = tenths / 10
    found = plan(origin=volume("db", size), cow_size=f"{percent:.1f}%", chunk_size=chunk)
    most = whole_table_bytes(size, found.chunk_bytes, 4 * MIB)
    assert 0 < found.size_bytes <= most
    assert found.size_bytes >= min(size * percent / 100, most) * 0.999 - MIB
    assert ("cannot overflow" in found.why) == (found.size_bytes == most)


def test_a_share_and_a_size():
    assert plan(cow_size="20%").about == "CoW table 2.0 GiB, chunks of 16.0 KiB: cow_size 20% of the origin"
    # The header and the exceptions come on top.
    assert plan(cow_size="20%").size_bytes == 2 * GIB + 4 * MIB
    assert plan(cow_size="512M").size_bytes == 516 * MIB


# ---- forecasts


def test_the_fastest_of_the_present_tables_foretells_the_next():
    # 50 % of 1 GiB in 10 h; for 24 h; twice that.
    found = plan(cow("a", 10.0), cow("b", 50.0), cow_size="forecast")
    assert found.size_bytes == pytest.approx(0.5 * GIB / 10 * 24 * 2, rel=0.01)
    assert "51.2 MiB an hour (measured by the CoW tables of 2 snapshots) for 1 d, times 2" in found.why


@pytest.mark.parametrize(
    "fields",
    [
        {"hours": 0.1},
        {"tags": frozenset()},
        {"invalid": True},
        {"percent": None},
        {"origin_uuid": "uuid-other"},
        {"made_at": "Sat Nov 21"},
    ],
)
def test_a_table_that_says_nothing_is_not_asked(fields):
    percent = fields.pop("percent", 50.0)
    found = plan(cow("a", percent, **fields), cow_size="forecast")
    assert found.why == "20% of the origin, as no write rate is known yet"


def test_without_snapshots_all_writes_count():
    found = plan(cow_size="forecast", writes=Writes(written_bytes=36 * GIB, age_s=36000.0), cow_lifetime="1h")
    assert found.size_bytes == pytest.approx(3.6 * GIB * 2, rel=0.01)
    assert "all writes of the last 10 h" in found.why


def test_a_volume_that_is_younger_than_the_boot_was_written_to_since_it_was_made():
    young = volume("db", made_at=f"{NOW - timedelta(hours=1):%Y-%m-%d %H:%M:%S %z}")
    found = plan(cow_size="forecast", origin=young, writes=Writes(written_bytes=GIB, age_s=1e6), cow_lifetime="1h")
    assert found.size_bytes == pytest.approx(2 * GIB, rel=0.01)


def test_a_quiet_past_leaves_room_all_the_same():
    found = plan(cow_size="forecast", writes=Writes(written_bytes=0, age_s=36000.0))
    assert found.size_bytes == pytest.approx(0.05 * 10 * GIB, rel=0.02)
    assert "at least 5% of the origin" in found.why


def test_the_writes_of_a_device_are_read_from_sysfs(tmp_path):
    (tmp_path / "sys/dev/block/253:7").mkdir(parents=True)
    (tmp_path / "sys/dev/block/253:7/stat").write_text("  1 2 3 4 5 6 2048 8 9 10 11\n")
    (tmp_path / "uptime").write_text("3600.25 7000.00\n")
    found = sizing.measure_writes("253:7", sysfs=tmp_path / "sys", proc=tmp_path)
    assert found == Writes(written_bytes=MIB, age_s=3600.25)
    assert sizing.measure_writes("253:8", sysfs=tmp_path / "sys", proc=tmp_path) is None
    assert sizing.measure_writes(None, sysfs=tmp_path / "sys", proc=tmp_path) is None


def test_no_room_is_said_with_numbers_and_what_to_do():
    origin = volume("db")
    found = plan(cow_size="1G")
    require_room(group(origin, free=2 * GIB), origin, found, promised_bytes=512 * MIB)
    with pytest.raises(StorageError, match=r"needs 1\.0 GiB .*, and 512\.0 MiB are free in vg0") as caught:
        require_room(group(origin, free=2 * GIB), origin, found, promised_bytes=1536 * MIB)
    assert "vgextend vg0" in caught.value.hint


# ---- gauges


def test_what_can_run_full_is_named_once_for_all_and_then_for_each_snapshot():
    found = gauges.of_group(group(volume("db"), cow("a", 25.0), pool(), thin("t1"), thin("t2")))
    assert [(one.name, one.used_bytes, one.size_bytes, one.when_full) for one in found] == [
        ("data of the thin pool vg0/pool", 5 * GIB, 10 * GIB, "origin_errors"),
        ("metadata of the thin pool vg0/pool", 10 * MIB, 100 * MIB, "origin_errors"),
        ("the volume group vg0", 95 * GIB, 100 * GIB, "no_snapshots"),
        ("CoW table of vg0/a", GIB // 4, GIB, "snapshot_lost"),
    ]
    assert found[2].wanted_bytes == GIB
    assert found[3].ref == SnapshotRef(
        backend="lvm", snapshot_id="job.a", pool=POOL, volume_id="uuid-db", name="a", native_id="uuid-a"
    )
    assert all(one.valid for one in found)


def test_what_is_shared_concerns_those_whose_snapshots_use_it_or_who_live_in_it():
    inside = volume("u", segtype="thin", pool_uuid="uuid-pool")
    ours = frozenset({"snapmgr", "snapmgr.id=job.b", "snapmgr.origin=uuid-u"})
    classic = cow("b", 1.0, tags=ours, origin_uuid="uuid-u")
    found = gauges.of_group(group(volume("db"), cow("a", 25.0), inside, classic, pool(), thin("t1")))
    assert [(one.name.split()[0], one.volume_ids) for one in found if one.ref is None] == [
        ("data", ("uuid-t", "uuid-u")),
        ("metadata", ("uuid-t", "uuid-u")),
        ("the", ("uuid-db", "uuid-u")),
    ]


def test_what_is_not_ours_is_no_gauge():
    foreign = cow("a", 25.0, tags=frozenset({"snapmgr.id=job.a", "snapmgr.origin=uuid-db"}))
    assert (
        gauges.of_group(group(volume("db"), foreign, pool(), volume("t", segtype="thin", pool_uuid="uuid-pool"))) == ()
    )


def test_only_an_invalid_snapshot_is_lost_and_one_at_100_percent_is_whole():
    full, lost, unknown = cow("full", 100.0), cow("lost", 100.0, invalid=True), cow("off", None)
    found = gauges.of_group(group(volume("db"), full, lost, unknown))[1:]
    assert [(one.name, one.valid, one.used_bytes) for one in found] == [
        ("CoW table of vg0/full", True, GIB),
        ("CoW table of vg0/lost", False, GIB),
    ]


@pytest.mark.parametrize(
    "fields", [{"health": "out_of_data"}, {"health": "metadata_read_only"}, {"check_needed": True}]
)
def test_a_pool_that_cannot_be_written_is_not_sound(fields):
    found = gauges.of_group(group(pool(**fields), thin("t1")))
    assert [one.valid for one in found] == [False, False]


def test_headroom_is_of_the_pool_for_thin_and_of_the_group_for_classic_snapshots():
    one = group(volume("db"), pool())
    (space,) = gauges.of_volume(one, volume("db"), cow_bytes=GIB)
    assert (space.when_full, space.wanted_bytes) == ("no_snapshots", GIB)
    names = [one.name for one in gauges.of_volume(one, thin("t"), cow_bytes=None)]
    assert names == ["data of the thin pool vg0/pool", "metadata of the thin pool vg0/pool"]


@pytest.mark.parametrize(
    ("percents", "when_full", "words"),
    [
        ((80.0, 10.0), "queue", "data are 80.0 % full .* stall for 60 s and then fail"),
        ((80.0, 10.0), "error", "data are 80.0 % full .* fail immediately"),
        ((10.0, 80.0), "queue", "metadata are 80.0 % full .* become read-only"),
    ],
)
def test_a_pool_that_is_too_full_takes_no_snapshot_and_what_would_happen_is_said(percents, when_full, words):
    origin, full = thin("t"), pool(*percents, when_full=when_full)
    with pytest.raises(StorageError, match=words) as caught:
        arming.check_pool(LvmConfig(), group(origin, full), origin)
    assert "lvextend" in caught.value.hint
    arming.check_pool(LvmConfig(), group(origin, pool(79.9, 79.9)), origin)


# ---- more room


class Lvm:
    """A runner that remembers."""

    def __init__(self, monkeypatch, found):
        self.ran = []
        monkeypatch.setattr(gauges, "read_group", lambda _runner, _pool: found)

    def run(self, argv, **_options):
        self.ran.append(list(argv))
        return Completed(argv=tuple(argv), returncode=0, stdout="", stderr="")


def auto_extend(monkeypatch, *volumes, free=5 * GIB, auto_extend=True):
    runner = Lvm(monkeypatch, group(volume("db"), *volumes, free=free))
    ref = SnapshotRef(backend="lvm", snapshot_id="job.a", pool=POOL, volume_id="uuid-db", name="a", native_id="uuid-a")
    return gauges.auto_extend(LvmConfig(auto_extend=auto_extend), runner, ref), runner.ran


def test_a_table_that_is_70_percent_full_is_enlarged_by_half(monkeypatch):
    said, ran = auto_extend(monkeypatch, cow("a", 70.0))
    assert ran == [["lvextend", "--yes", "--size", f"+{512 * MIB}b", "vg0/a"]]
    assert said == "the CoW table of vg0/a was 70 % full: enlarged from 1.0 GiB to 1.5 GiB"


def test_as_much_as_there_is_and_an_error_when_there_is_nothing(monkeypatch):
    assert auto_extend(monkeypatch, cow("a", 80.0), free=10 * MIB)[1][0][3] == f"+{8 * MIB}b"
    with pytest.raises(StorageError, match="80 % full, and nothing is free in vg0"):
        auto_extend(monkeypatch, cow("a", 80.0), free=0)


def test_never_beyond_what_the_whole_origin_needs(monkeypatch):
    most = whole_table_bytes(10 * GIB, 16 * KIB, 4 * MIB)
    assert auto_extend(monkeypatch, cow("a", 90.0, size=most - 8 * MIB))[1][0][3] == f"+{8 * MIB}b"
    assert auto_extend(monkeypatch, cow("a", 90.0, size=most)) == (None, [])


@pytest.mark.parametrize(
    ("one", "allowed"),
    [
        (cow("a", 69.0), True),
        (cow("a", 99.0), False),
        (cow("a", 100.0, invalid=True), True),
        (cow("a", None), True),
        (replace(thin("a"), snap_percent=99.0), True),
    ],
)
def test_nothing_is_done_where_nothing_is_to_be_done(monkeypatch, one, allowed):
    assert auto_extend(monkeypatch, one, auto_extend=allowed) == (None, [])


def test_a_snapshot_that_is_gone_is_said(monkeypatch):
    with pytest.raises(NotFoundError):
        auto_extend(monkeypatch)


# ---- a merge


def test_a_merge_that_ends_while_it_is_continued_is_done_and_not_a_lost_snapshot(monkeypatch):
    begun = volume("db", tags=frozenset({"snapmgr.reverting=token.classic"}), active=True)
    readings = [group(begun, replace(cow("a", 10.0), merging=True)), group(begun)]
    monkeypatch.setattr(revert, "read_group", lambda _runner, _pool: readings.pop(0) if readings[1:] else readings[0])
    ran = []
    monkeypatch.setattr(revert, "change", lambda _runner, argv: ran.append(argv))
    ref = SnapshotRef(backend="lvm", snapshot_id="job.a", pool=POOL, volume_id="uuid-db", name="a", native_id="uuid-a")
    merge = revert.Reverting()
    merge._runner = None
    merge.begin_revert(ref, "token")
    assert ran[-1] == ["lvchange", "--yes", "--poll", "y", "vg0/db"]
    assert merge.revert_state(ref, "token") == "done"
    merge.begin_revert(ref, "token")
    with pytest.raises(NotFoundError, match="not by being merged"):
        merge.begin_revert(ref, "other")
