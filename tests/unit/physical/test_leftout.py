"""Which tables a tool has left out of a backup."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.physical.tools.leftout import left_out

INNODB = b"\xfe\x01\x0a\x0c" + bytes(60)
MYISAM = b"\xfe\x01\x0a\x09" + bytes(60)
PARTITIONED = b"\xfe\x01\x0a\x14" + bytes(60)
VIEW = b"TYPE=VIEW\nquery=select 1\n"


# As mariadb-backup 10.11.19 and 11.8.6 print it.
LINE = (
    "[02] 2026-11-22 00:43:06 Warning: We assume the  table was dropped during xtrabackup execution and ignore the "
    "tablespace ./{}.ibd\n"
)


@pytest.mark.parametrize(
    ("frm", "live", "copied", "expected"),
    [
        (INNODB, "t.ibd", "", ("a/t",)),
        (INNODB, "t.ibd", "tt.ibd", ("a/t",)),
        # Dropped indeed, or discarded.
        (None, "t.ibd", "", ()),
        (INNODB, "", "", ()),
        # Made again.
        (INNODB, "t.ibd", "t.ibd", ()),
        (INNODB, "t.ibd", "t.ibd.delta", ()),
        (INNODB, "t.ibd", "t.new", ()),
        (INNODB, "t.ibd", "t.new.delta", ()),
        # Dropped, made again as another thing, and once more since the backup.
        (MYISAM, "t.ibd", "", ()),
        (VIEW, "t.ibd", "", ()),
        (b"\xfe", "t.ibd", "", ()),
    ],
)
def test_a_tablespace_is_missing_whose_definition_is_there(
    tmp_path: Path, frm: bytes | None, live: str, copied: str, expected: tuple[str, ...]
) -> None:
    lay(tmp_path, frm, live, copied)
    assert ask(tmp_path, LINE.format("a/t")) == expected


def test_a_partition_has_its_tables_definition(tmp_path: Path) -> None:
    lay(tmp_path, PARTITIONED, "t#P#p1.ibd", "t#P#p0.ibd")
    assert ask(tmp_path, LINE.format("a/t#P#p1")) == ("a/t#P#p1",)


def test_what_the_tool_did_not_ignore_is_not_missing(tmp_path: Path) -> None:
    """A table that was renamed while it was copied is there by its old name."""
    lay(tmp_path, INNODB, "t.ibd", "old.ibd")
    assert ask(tmp_path, LINE.format("a/other") + "[00] completed OK!\n") == ()


def lay(folder: Path, frm: bytes | None, live: str, copied: str) -> None:
    for schema, name in ((folder / "live" / "a", live), (folder / "backup" / "a", copied)):
        schema.mkdir(parents=True)
        if name:
            (schema / name).touch()
    if frm is not None:
        (folder / "backup" / "a" / "t.frm").write_bytes(frm)


def ask(folder: Path, log: str) -> tuple[str, ...]:
    (folder / "log").write_text(log)
    return left_out(str(folder / "backup"), str(folder / "live"), str(folder / "log"))
