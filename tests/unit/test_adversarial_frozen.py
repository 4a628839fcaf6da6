"""Records of frozen servers: damaged ones end no command, planted ones let nobody's process go on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from snapmgr.cli.main import main
from snapmgr.mysql.lock.freeze import thaw_leftovers
from snapmgr.system.boot import boot_id
from snapmgr.system.host import start_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.catalog.store import Catalog


@contextmanager
def _stopped() -> Iterator[int]:
    """Somebody's process, which somebody stopped."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        while _state(process.pid) != "T":
            time.sleep(0.01)
        try:
            yield process.pid
        finally:
            process.kill()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def _record(pid: int) -> str:
    return f"{pid} {start_ticks(pid)} {boot_id()}\n1 1 {boot_id()}\n1.0\n"


@pytest.mark.needs("root")
@pytest.mark.parametrize("folder", ["state", "state/frozen"])
def test_a_planted_record_is_not_obeyed(
    config: Path, catalog: Catalog, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    catalog.frozen.mkdir(mode=0o700)
    with _stopped() as pid:
        (catalog.frozen / str(pid)).write_text(_record(pid))
        os.chown(catalog.path.parent / folder, 12345, -1)
        for command in (("list",), ("show", "latest"), ("doctor",), ("prune",), ("umount", "--all")):
            assert main(["--config", str(config), *command]) == 1
            assert "belongs to user 12345" in capsys.readouterr().err
        assert _state(pid) == "T"
        os.chown(catalog.path.parent / folder, 0, -1)
        main(["--config", str(config), "doctor"])
        assert f"(pid {pid}) frozen; it is resumed now" in capsys.readouterr().err
        assert _state(pid) == "S"


def test_a_record_of_another_process_with_that_number_thaws_nobody(tmp_path: Path) -> None:
    with _stopped() as pid:
        text = _record(pid)
        for wrong in (
            text.replace(f"{pid} {start_ticks(pid)}", f"{pid} 1"),
            text.replace(boot_id(), "another"),
            f"{10**30} 1 {boot_id()}\n" + text.partition("\n")[2],
            f"-1 1 {boot_id()}\n" + text.partition("\n")[2],
            f"0 1 {boot_id()}\n" + text.partition("\n")[2],
        ):
            (tmp_path / str(pid)).write_text(wrong)
            assert thaw_leftovers(tmp_path) == []
            assert _state(pid) == "T"


def test_each_byte_of_a_record(tmp_path: Path) -> None:
    with _stopped() as pid:
        data = _record(pid).encode()
        for place in range(len(data)):
            for byte in (0, 0x20, 0x2D, 0x39, 0xFF):
                (tmp_path / "record").write_bytes(data[:place] + bytes([byte]) + data[place + 1 :])
                thaw_leftovers(tmp_path)
                assert not (tmp_path / "record").exists()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
        (said,) = thaw_leftovers(tmp_path)
        assert "its record cannot be read" in said
