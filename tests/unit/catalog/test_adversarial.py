"""Files of the state directory, damaged in every way: a record or a named problem, and nothing is deleted on it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.catalog.manifest import Lease, Manifest, Schedule, Verification, decode, encode
from snapmgr.catalog.store import Catalog
from snapmgr.cli.main import main
from snapmgr.contract.errors import CatalogError, SnapmgrError
from support.sample import NOW, lease, manifest

if TYPE_CHECKING:
    from collections.abc import Callable

Record = Manifest | Verification | Lease | Schedule

VERIFICATION = Verification(at=NOW, result="passed", duration_s=2.5, checks=("it started",), failures=())
SCHEDULE = Schedule(job="nightly", kind="cron", expression="daily", installed_at=NOW)
RECORDS: list[Record] = [manifest(), VERIFICATION, lease(manifest()), SCHEDULE]
FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(data: bytes, kind: type[Any]) -> None:
    """Decode: a record that is written as it is read, or a CatalogError that says where."""
    with suppress(CatalogError):
        record = decode(data, kind, "/the/file")
        assert decode(encode(record), kind, "again") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_each_byte_exchanged_left_out_doubled_and_each_length(record: Record) -> None:
    data = encode(record)
    kind = type(record)
    for place in range(len(data)):
        for byte in (data[place] ^ 1, data[place] ^ 0x20, data[place] ^ 0x80, 0, 0x5C):
            check(data[:place] + bytes([byte]) + data[place + 1 :], kind)
        check(data[:place], kind)
        check(data[:place] + data[place + 1 :], kind)
        check(data[: place + 1] + data[place:], kind)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-01-31T02:30:00", "\0", "../.."]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, ...]] = [path]
    if isinstance(value, dict):
        inner += [one for key, part in value.items() for one in _paths(part, (*path, key))]
    elif isinstance(value, list):
        inner += [one for number, part in enumerate(value) for one in _paths(part, (*path, number))]
    return inner


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = _with(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
@given(data=st.data())
def test_any_value_in_any_place(record: Record, data: st.DataObject) -> None:
    document = json.loads(encode(record))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_paths(document)))
        document = _with(document, path, data.draw(JSON))
    check(json.dumps(document).encode(), type(record))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_at", "2026-01-31T02:30:00"),
        ("created_at", "0001-01-01T00:00:00+14:00"),
        ("taken_at", "9999-12-31T23:59:59-14:00"),
        ("path", "/srv\0/x"),
        ("schema", 2),
        ("schema", None),
    ],
)
def test_what_the_type_allows_and_the_system_calls_do_not(field: str, value: object) -> None:
    document = json.loads(encode(manifest())) | {field: value}
    with pytest.raises(CatalogError):
        decode(json.dumps(document).encode(), Manifest, "x")


def test_a_nul_is_found_wherever_it_is_and_nothing_is_taken_for_one() -> None:
    member = manifest().members[0]
    for bad in (replace(member, subpath="a\0"), replace(member, places={"/srv\0": ""})):
        with pytest.raises(CatalogError, match="NUL"):
            decode(encode(replace(manifest(), members=(bad,))), Manifest, "x")
    named = replace(manifest(), pin_reason="\\u0000")
    assert decode(encode(named), Manifest, "x") == named


@pytest.mark.parametrize("folder", ["../../etc", "/etc", "..", ".", "a/b"])
def test_a_lease_cannot_name_a_folder_elsewhere(folder: str) -> None:
    one = lease(manifest())
    bad = replace(one, parts=(replace(one.parts[0], folder=folder),))
    with pytest.raises(CatalogError, match="damaged"):
        decode(encode(bad), Lease, "x")
    with pytest.raises(CatalogError, match="damaged"):
        decode(encode(replace(one, point="relative")), Lease, "x")


# ---------------------------------------------------------------------------------------------- the catalog as a whole


def _plant_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _plant_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def _plant_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def _plant_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _plant_other(path: Path) -> None:
    path.write_bytes(encode(manifest(1)))


def _open_to_others(path: Path) -> None:
    path.chmod(0o666)


def _whose_job(path: Path) -> None:
    path.write_bytes(encode(manifest(0, job="nightly")).replace(b'"job": "nightly"', b'"job": "night"'))


PLANTS: list[Callable[[Path], Any]] = [
    _plant_fifo,
    _plant_folder,
    _plant_link,
    _plant_huge,
    _plant_other,
    _open_to_others,
    _whose_job,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"[" * 100_000),
    lambda path: path.write_bytes(b"{}"),
    lambda path: path.write_bytes(encode(manifest())[:-20]),
]
COMMANDS = [
    ("list",),
    ("list", "--json"),
    ("status",),
    ("doctor",),
    ("doctor", "--json"),
    ("prune", "--dry-run"),
    ("prune",),
    ("mount", "--list"),
    ("umount", "--all", "--dry-run"),
    ("show", manifest(0).id),
    ("mount", manifest(0).id, "--dry-run"),
    ("verify", manifest(0).id, "--dry-run"),
]


@pytest.mark.parametrize("plant", range(len(PLANTS)))
@pytest.mark.parametrize("what", ["manifest.json", "verified.json", "lease"])
def test_no_command_falls_over_a_damaged_file_or_deletes_on_it(
    config: Path, catalog: Catalog, capsys: pytest.CaptureFixture[str], what: str, plant: int
) -> None:
    folder = catalog.path / "snapshots" / manifest(0).id
    path = folder / what if what != "lease" else next((catalog.path / "leases").iterdir())
    if what != "manifest.json" and PLANTS[plant] in (_plant_other, _whose_job):
        path.write_bytes(encode(lease(manifest(1))))
        if what == "lease":
            path.rename(path.with_name("ffffffffffffffff.json"))
    else:
        PLANTS[plant](path)
    before = sorted(str(one) for one in catalog.path.rglob("*"))
    start = time.monotonic()
    for command in COMMANDS:
        code = main(["--config", str(config), *command])
        said = capsys.readouterr()
        assert code in range(8), command
        assert "bug in snapmgr" not in said.err
        assert "Traceback" not in said.err
        if command == ("list",):
            assert code == 1
            assert str(path if what == "lease" and plant != 2 else folder.name) in said.err or what == "lease"
    gone = set(before) - {str(one) for one in catalog.path.rglob("*")}
    # Nothing of it; the storage behind the samples is nowhere, so nothing can be pruned at all.
    assert gone == set()
    assert time.monotonic() - start < 20


def test_a_snapshot_whose_verification_is_damaged_can_be_used_but_is_not_judged(catalog: Catalog) -> None:
    path = catalog.path / "snapshots" / manifest(0).id / "verified.json"
    path.write_bytes(b"\xff")
    entries, damaged = catalog.entries()
    assert manifest(0).id not in {entry.manifest.id for entry in entries}
    assert [one.path.name for one in damaged] == [manifest(0).id]
    assert catalog.resolve(manifest(0).id).verification is None
    catalog.write_verification(manifest(0).id, VERIFICATION)
    assert catalog.entries()[1] == []


def test_what_others_put_beside_a_manifest_stays_when_it_is_forgotten(catalog: Catalog) -> None:
    folder = catalog.path / "snapshots" / manifest(0).id
    (folder / "notes of a colleague").mkdir()
    (folder / ".manifest.json.4711").touch()
    catalog.forget(manifest(0).id)
    assert [one.name for one in folder.iterdir()] == ["notes of a colleague"]
    assert manifest(0).id not in {entry.manifest.id for entry in catalog.entries()[0]}


def test_what_a_killed_process_had_begun_is_cleared_and_the_machine_is_claimed_once(catalog: Catalog) -> None:
    claimed = (catalog.path / "machine").read_text()
    (catalog.path / f".machine.{2**22 + 1}").touch()
    (catalog.path / f".machine.{os.getpid()}").touch()
    catalog.make()
    assert [path.name for path in catalog.path.glob(".machine.*")] == [f".machine.{os.getpid()}"]
    assert (catalog.path / "machine").read_text() == claimed


def test_a_linked_snapshot_folder_is_neither_read_nor_emptied(catalog: Catalog) -> None:
    folder = catalog.path / "snapshots" / manifest(0).id
    folder.rename(catalog.path.parent / "elsewhere")
    folder.symlink_to(catalog.path.parent / "elsewhere")
    assert len(catalog.entries()[1]) == 1
    with pytest.raises(SnapmgrError), catalog.deleting(manifest(0).id):
        pass
    assert (catalog.path.parent / "elsewhere" / "manifest.json").exists()


# ----------------------------------------------------------------------------------------------------- order and clock


def test_latest_is_what_was_taken_last_whatever_the_clock_said(catalog: Catalog) -> None:
    before = catalog.next_number(NOW)
    catalog.write(replace(manifest(6), number=before))
    year_ago = datetime(2025, 1, 1, tzinfo=UTC)
    late = replace(manifest(7), number=catalog.next_number(year_ago), taken_at=year_ago, created_at=year_ago)
    assert late.number == before + 1
    catalog.write(late)
    assert catalog.next_number(year_ago) == before + 2
    assert catalog.resolve("latest").manifest == late
    assert catalog.resolve("nightly@latest").manifest == late
    assert catalog.entries()[0][-1].manifest == late


def test_latest_is_what_was_taken_after_the_state_directory_was_lost(catalog: Catalog) -> None:
    """Not what `doctor --fix` takes over afterwards, however many those are."""
    numbers = [catalog.next_number(NOW)]
    for _ in range(3):
        numbers.append(numbers[-1] + 1)
    fresh = replace(manifest(9), number=catalog.next_number(NOW + timedelta(hours=9)))
    catalog.write(fresh)
    for hours, number in enumerate(numbers):
        catalog.write(replace(manifest(hours), number=number))
    assert catalog.resolve("latest").manifest == fresh


# ----------------------------------------------------------------------------------------------- who may change it all


@pytest.mark.parametrize("name", ["", "snapshots", "leases", "locks", "frozen"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_change_is_refused(catalog: Catalog, name: str, mode: int) -> None:
    culprit = catalog.path / name
    culprit.mkdir(exist_ok=True)
    culprit.chmod(mode)
    with pytest.raises(CatalogError, match="others could change") as caught:
        Catalog(catalog.path)
    assert str(culprit) in caught.value.message
    assert f"chmod go-w {culprit}" in (caught.value.hint or "")


@pytest.mark.needs("root")
@pytest.mark.parametrize("name", ["", "snapshots", "leases", "locks", "frozen"])
def test_a_folder_of_another_user_is_refused_before_anything_in_it_is_obeyed(
    config: Path, catalog: Catalog, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    culprit = catalog.path / name
    culprit.mkdir(exist_ok=True)
    os.chown(culprit, 12345, -1)
    assert main(["--config", str(config), "list"]) == 1
    assert "belongs to user 12345" in capsys.readouterr().err


def test_a_folder_that_is_a_link_is_refused(catalog: Catalog) -> None:
    (catalog.path / "leases").rename(catalog.path.parent / "leases")
    (catalog.path / "leases").symlink_to(catalog.path.parent / "leases")
    with pytest.raises(CatalogError, match="is a symlink"):
        Catalog(catalog.path)


def test_a_place_where_everybody_could_put_another_one_is_refused(catalog: Catalog) -> None:
    parent = catalog.path.parent
    parent.chmod(0o777)
    with pytest.raises(CatalogError, match="others could replace"):
        Catalog(catalog.path)
    parent.chmod(0o1777)
    Catalog(catalog.path)
    parent.chmod(0o700)
