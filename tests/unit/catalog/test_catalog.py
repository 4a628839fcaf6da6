"""The state directory: durable, careful about who may write it, and clear about what it cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from snapmgr.catalog.manifest import Lease, LeasePart, Manifest, Verification, encode
from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import BusyError, CatalogError, ConfigError, InUseError, NotFoundError, SnapmgrError
from snapmgr.contract.records import AttachRecord, Pool, SnapshotRef
from snapmgr.system.boot import boot_id
from snapmgr.system.host import this_process

NOW = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    return catalog


def manifest(job: str = "nightly", age_h: int = 0, tail: str = "00000001", **changes: object) -> Manifest:
    at = NOW - timedelta(hours=age_h)
    made = Manifest(
        id=f"{job}.{at:%Y%m%dT%H%M%SZ}.{tail}",
        job=job,
        source="directory",
        path="/srv",
        state="ready",
        created_at=at,
        taken_at=at,
        machine_id="m",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def lease(snapshot_id: str) -> Lease:
    pool = Pool(backend="reflink", id="p", hint="p")
    ref = SnapshotRef(backend="reflink", snapshot_id=snapshot_id, pool=pool, volume_id="v", name="n", native_id="i")
    return Lease(
        parts=(
            LeasePart(
                record=AttachRecord(id="00112233445566ff", ref=ref, writable=True, boot_id=boot_id()), subpath=""
            ),
        ),
        holder=this_process(),
        user="root",
        why="mount",
        created_at=NOW,
        until=None,
        point="/mnt/x",
    )


def test_what_is_written_is_read_again_and_oldest_comes_first(catalog: Catalog) -> None:
    new, old = manifest(tail="aa"), manifest(age_h=5, tail="bb")
    catalog.write(new)
    catalog.write(old)
    catalog.write_verification(old.id, Verification(at=NOW, result="passed", duration_s=1.5))
    entries, damaged = catalog.entries()
    assert [entry.manifest for entry in entries] == [old, new]
    assert [entry.verified for entry in entries] == [True, False]
    assert damaged == []


def test_a_manifest_that_cannot_be_written_as_json_leaves_no_folder(catalog: Catalog) -> None:
    with pytest.raises(SnapmgrError, match="not UTF-8"):
        catalog.write(manifest(path="/srv/\udcff"))
    assert list((catalog.path / "snapshots").iterdir()) == []


def test_a_job_is_not_taken_for_one_with_a_longer_name(catalog: Catalog) -> None:
    catalog.write(manifest(job="a"))
    catalog.write(manifest(job="ab"))
    assert [entry.manifest.job for entry in catalog.entries("a")[0]] == ["a"]


@pytest.mark.parametrize(
    ("text", "tail"),
    [("a1", "a1b2"), ("latest", "c3d4"), ("other@latest", "e5f6"), ("nightly.20260301T0130", "a1b2")],
)
def test_ids_may_be_short(catalog: Catalog, text: str, tail: str) -> None:
    catalog.write(manifest(tail="a1b2", age_h=1))
    catalog.write(manifest(tail="c3d4"))
    catalog.write(manifest(tail="e5f6", job="other", age_h=9))
    catalog.write(manifest(tail="0000", state="broken"))
    assert catalog.resolve(text).manifest.short_id == tail


def test_latest_passes_over_what_is_known_to_be_bad_and_names_it(catalog: Catalog) -> None:
    results: dict[str, Literal["passed", "partly", "failed"]] = {"a1a1": "passed", "b2b2": "partly", "c3c3": "failed"}
    for number, (tail, result) in enumerate(results.items()):
        one = manifest(tail=tail, age_h=9 - number)
        catalog.write(one)
        catalog.write_verification(one.id, Verification(at=NOW, result=result, duration_s=1))
    broken = manifest(tail="d4d4", age_h=1, state="broken", reason="its storage is gone")
    catalog.write(broken)
    catalog.write(manifest(tail="e5e5", state="pending"))
    told: list[str] = []
    for name in ("latest", "nightly@latest"):
        assert catalog.resolve(name, told.append).manifest.short_id == "b2b2"
    assert len(told) == 2
    assert told[0].startswith("warning: latest is nightly.20260228T183000Z.b2b2; not considered: ")
    assert f"{broken.id} (BROKEN: its storage is gone)" in told[0]
    assert "c3c3 (failed its verification)" in told[1]
    assert "e5e5" not in told[0]
    for name in ("latest-verified", "nightly@latest-verified"):
        assert catalog.resolve(name, told.append).manifest.short_id == "a1a1"
    assert len(told) == 2
    # A file that cannot be read may be that of the newest one.
    (catalog.path / "snapshots" / broken.id / "manifest.json").write_text("{")
    catalog.resolve("latest", told.append)
    assert "is damaged" in told[-1]


def test_latest_is_an_error_if_only_failed_ones_are_left(catalog: Catalog) -> None:
    one = manifest(tail="c3c3")
    catalog.write(one)
    with pytest.raises(NotFoundError, match="no VERIFIED snapshot of job nightly"):
        catalog.resolve("nightly@latest-verified")
    catalog.write_verification(one.id, Verification(at=NOW, result="failed", duration_s=1))
    with pytest.raises(NotFoundError, match=rf"all READY snapshots failed their verification: {one.id}"):
        catalog.resolve("latest")


def test_an_id_that_fits_none_or_several_is_an_error(catalog: Catalog) -> None:
    catalog.write(manifest(tail="a1b2", age_h=1))
    catalog.write(manifest(tail="a1c3"))
    with pytest.raises(ConfigError, match="fits 2"):
        catalog.resolve("a1")
    for text in ("ff", "", "nobody@latest"):
        with pytest.raises(NotFoundError):
            catalog.resolve(text)


def test_a_damaged_manifest_is_reported_beside_the_good_ones(catalog: Catalog) -> None:
    good, bad, swapped = manifest(tail="aa"), manifest(tail="bb"), manifest(tail="cc")
    for one in (good, bad, swapped):
        catalog.write(one)
    (catalog.path / "snapshots" / bad.id / "manifest.json").write_bytes(encode(bad)[:50])
    (catalog.path / "snapshots" / swapped.id / "manifest.json").write_bytes(encode(good))
    entries, damaged = catalog.entries()
    assert [entry.manifest.id for entry in entries] == [good.id]
    assert {one.path.name for one in damaged} == {bad.id, swapped.id}


def test_only_one_run_of_a_job(catalog: Catalog) -> None:
    script = (
        "import sys; from pathlib import Path; from snapmgr.catalog.store import Catalog\n"
        "with Catalog(Path(sys.argv[1])).job_lock('nightly'): pass"
    )
    with catalog.job_lock("nightly"):
        with pytest.raises(BusyError, match=str(os.getpid())), catalog.job_lock("nightly"):
            pass
        other = subprocess.run(
            [sys.executable, "-c", script, str(catalog.path)], capture_output=True, text=True, check=False
        )
        assert "BusyError" in other.stderr
        with catalog.job_lock("other"):
            pass
    with catalog.job_lock("nightly"):
        pass


def test_readers_and_leases_keep_deleters_away(catalog: Catalog) -> None:
    one = manifest()
    catalog.write(one)
    with catalog.reading(one.id), catalog.reading(one.id), pytest.raises(InUseError), catalog.deleting(one.id):
        pass
    with catalog.deleting(one.id), pytest.raises(InUseError), catalog.reading(one.id):
        pass
    held = lease(one.id)
    catalog.write_lease(held)
    with pytest.raises(InUseError, match="/mnt/x"), catalog.deleting(one.id):
        pass
    catalog.drop_lease(held)
    with catalog.deleting(one.id):
        pass


def test_forget_is_idempotent_and_leaves_nothing(catalog: Catalog) -> None:
    one = manifest()
    catalog.write(one)
    catalog.write_verification(one.id, Verification(at=NOW, result="passed", duration_s=1.0))
    catalog.forget(one.id)
    catalog.forget(one.id)
    assert list((catalog.path / "snapshots").iterdir()) == []


def test_a_crash_between_folder_and_manifest_is_no_snapshot(catalog: Catalog) -> None:
    (catalog.path / "snapshots" / "nightly.x.1").mkdir()
    assert catalog.entries() == ([], [])


@pytest.mark.parametrize("mode", [0o707, 0o777])
def test_a_world_writable_state_directory_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(CatalogError, match="others could change"):
        Catalog(path)


def test_a_symlink_or_file_as_state_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(CatalogError, match="not a directory"):
            Catalog(tmp_path / name)


def test_a_symlinked_manifest_is_not_followed(catalog: Catalog) -> None:
    one = manifest()
    catalog.write(one)
    path = catalog.path / "snapshots" / one.id / "manifest.json"
    path.rename(catalog.path / "elsewhere.json")
    path.symlink_to(catalog.path / "elsewhere.json")
    assert len(catalog.entries()[1]) == 1


def test_a_failed_write_keeps_the_old_content(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    one = manifest()
    catalog.write(one)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CatalogError, match="No space left") as failure:
        catalog.write(one.with_state("broken", reason="x"))
    monkeypatch.undo()
    assert failure.value.hint == "make room on its file system"
    assert catalog.load(one.id).manifest == one
    assert [path.name for path in (catalog.path / "snapshots" / one.id).iterdir()] == ["manifest.json"]
