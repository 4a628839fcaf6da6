"""A throwaway server on damaged copies, and on a machine whose limits look like damage."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import MissingRequirementError, VerificationError
from snapmgr.mysql.server.throwaway import throwaway
from support.copies import MEMORY, check, frozen
from support.processes import servers_on
from support.storage import work_folder

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.needs("root", "mariadbd")


def damage(path: Path) -> None:
    """Overwrite a page in the middle of what is in use: the server must open the table and meet the damage later."""
    page, data = 16384, path.read_bytes()
    numbers = range(len(data) // page)
    if path.suffix == ".ibd":
        # Page type 17855 is a B-tree's; the file is longer than what is used of it.
        numbers = [n for n in numbers if int.from_bytes(data[n * page + 24 : n * page + 26], "big") == 17855]
    assert len(numbers) > 10
    with open(path, "r+b") as file:
        file.seek(numbers[len(numbers) // 2] * page)
        file.write(os.urandom(page))


@pytest.mark.parametrize(("engine", "extension"), [("InnoDB", ".ibd"), ("Aria", ".MAD"), ("MyISAM", ".MYD")])
@pytest.mark.parametrize("depth", ["quick", "extended"])
def test_overwritten_pages_are_found(source, copy, run_dir, binary, engine, extension, depth):
    _, layout = source
    path = copy / "shop" / f"{engine}{extension}"
    damage(path)
    failures: tuple[str, ...] = ()
    try:
        with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
            failures = check(server, depth).failures
    except VerificationError as error:
        failures = (error.message,)
    if depth == "quick" and engine != "InnoDB":
        # QUICK does not look at rows of Aria and MyISAM: docs/explanation/verification.md says so, and "extended" is
        # there for it.
        assert failures == ()
        return
    assert failures
    assert any(engine in text for text in failures), failures


def test_a_damaged_blob_that_the_server_gives_back_as_empty_is_found(source, copy, run_dir, binary):
    """CHECK TABLE does not look at BLOB pages, and a SELECT gets an empty value without an error."""
    _, layout = source
    path = copy / "shop" / "blobs.ibd"
    data, page = path.read_bytes(), 16384
    # Page type 10: a BLOB's.
    blobs = [n for n in range(len(data) // page) if int.from_bytes(data[n * page + 24 : n * page + 26], "big") == 10]
    assert len(blobs) > 100
    with open(path, "r+b") as file:
        file.seek(blobs[len(blobs) // 2] * page + 2000)
        file.write(os.urandom(64))
    with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
        report = check(server, "extended")
        assert len(report.failures) == 1
        assert report.failures[0].startswith("`shop`.`blobs`: the server's log says: ")
        assert "blobs.ibd" in report.failures[0]


def test_a_missing_system_tablespace_is_damage_and_the_message_says_so(source, copy, run_dir, binary):
    _, layout = source
    (copy / "ibdata1").unlink()
    with (
        pytest.raises(VerificationError, match="ibdata1|system tablespace|redo") as caught,
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir),
    ):
        pass
    assert len(caught.value.message) < 3000
    assert servers_on(copy) == []


def test_files_of_another_owner_are_damage(source, copy, run_dir, binary):
    _, layout = source
    os.chown(copy / "ibdata1", 0, 0)
    os.chmod(copy / "ibdata1", 0o600)
    with (
        pytest.raises(VerificationError) as caught,
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir),
    ):
        pass
    assert "do not belong to the owner" in (caught.value.hint or "")


def test_a_datadir_of_root_with_files_of_others_is_damage(source, copy, run_dir, binary):
    _, layout = source
    os.chown(copy, 0, 0)
    with (
        pytest.raises(VerificationError, match="belongs to root"),
        throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir),
    ):
        pass


def test_missing_binary_logs_are_named_as_the_reason_or_harmless(source, copy, run_dir, binary):
    """Without its binary log a copy with prepared transactions must not come up; one without them may."""
    _, layout = source
    for path in copy.glob("binlog.*"):
        path.unlink()
    try:
        with throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as server:
            assert check(server).failures == ()
    except VerificationError as error:
        assert "binary log" in (error.hint or "")  # noqa: PT017 - one of two legal outcomes


def test_a_closed_folder_above_the_copy_is_not_damage(source, copy, binary):
    _, layout = source
    with work_folder() as folder:
        closed = folder / "closed"
        closed.mkdir(mode=0o700)
        with (
            pytest.raises(MissingRequirementError, match="cannot reach"),
            throwaway(binary, str(copy), settings=layout.settings, memory_bytes=MEMORY, run_dir=str(closed / "run")),
        ):
            pass


def test_an_unknown_option_is_not_damage(source, copy, run_dir, binary):
    _, layout = source
    with (
        pytest.raises(MissingRequirementError, match="nonsense"),
        throwaway(
            binary,
            str(copy),
            settings=layout.settings,
            memory_bytes=MEMORY,
            run_dir=run_dir,
            options=["--nonsense=1"],
        ),
    ):
        pass


def test_a_full_file_system_is_not_damage(source, copy, run_dir, binary):
    """This test will give the server no room for its temporary tablespace."""
    _, layout = source
    # A server begins by removing the old one, which would make room.
    (copy / "ibtmp1").unlink()
    used = int(subprocess.run(["du", "-sk", str(copy)], check=True, capture_output=True).stdout.split()[0])
    with work_folder() as folder:
        point = folder / "full"
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + 1024}k", "tmpfs", str(point)], check=True)
        try:
            subprocess.run(["cp", "-a", str(copy), str(point / "d")], check=True)
            arguments = {"settings": layout.settings, "memory_bytes": MEMORY, "run_dir": run_dir, "time_limit_s": 5}
            with pytest.raises(MissingRequirementError) as caught, throwaway(binary, point / "d", **arguments):
                pass
            assert "free space" in (caught.value.hint or "")
        finally:
            subprocess.run(["umount", str(point)], check=True)


def test_an_unclosed_myisam_table_is_a_warning_and_no_damage(source, base, run_dir, binary):
    """A file-by-file copy with MyISAM tables in use says so, but the tables are whole."""
    server, layout = source
    target = base / "inuse"
    try:
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO shop.MyISAM VALUES (1000000, 'x')")
            with frozen(server):
                subprocess.run(["cp", "-a", str(server.datadir), str(target)], check=True)
            cursor.execute("DELETE FROM shop.MyISAM WHERE id = 1000000")
        with throwaway(binary, str(target), settings=layout.settings, memory_bytes=MEMORY, run_dir=run_dir) as started:
            report = check(started, "extended")
        assert report.failures == ()
        assert any("hasn't closed the table properly" in note for note in report.notes)
    finally:
        shutil.rmtree(target, ignore_errors=True)
