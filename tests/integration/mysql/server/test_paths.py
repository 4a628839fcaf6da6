"""A throwaway server on copies whose absolute paths would lead to the live data."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.datadir.layout import read_layout
from snapmgr.mysql.server.throwaway import throwaway
from support.copies import MEMORY, check, frozen
from support.processes import wait_until
from support.server import private_server, server_user

pytestmark = pytest.mark.needs("root", "mariadbd")


def test_an_absolute_index_of_the_binary_log_leads_to_the_copy(base, run_dir, binary):
    """With log-bin given as an absolute path the index has absolute names: the live files must not be touched."""
    live, logs = base / "live2", base / "logs2"
    logs.mkdir()
    os.chown(logs, server_user().pw_uid, server_user().pw_gid)
    copied = base / "volume2"
    copied.mkdir()
    try:
        with private_server(live, [f"--log-bin={logs}/bin"]) as server:
            server.query("CREATE DATABASE shop")
            server.query("FLUSH BINARY LOGS")
            with connect(Credentials(socket=server.socket)) as connection:
                layout = read_layout(connection, identify(connection))
            assert str(logs) in (logs / "bin.index").read_text()
            with frozen(server):
                for folder in (live, logs):
                    subprocess.run(["cp", "-a", str(folder), str(copied)], check=True)
            # The live server notes by itself, a moment later, that it needs the first log no more.
            wait_until(lambda: (logs / "bin.000002").read_bytes().count(b"bin.00000") > 1)
            before = {path: path.read_bytes() for path in sorted(logs.iterdir())}
            with throwaway(
                binary,
                str(copied / "live2"),
                settings=layout.settings,
                memory_bytes=MEMORY,
                run_dir=run_dir,
            ) as started:
                with started.connect() as connection:
                    assert connection.variables("log_bin_basename")["log_bin_basename"] == str(copied / "logs2/bin")
                    assert len(connection.rows("SHOW BINARY LOGS")) == 3
                assert all(str(copied) in line for line in (copied / "logs2/bin.index").read_text().split())
            assert {path: path.read_bytes() for path in sorted(logs.iterdir())} == before
    finally:
        for folder in (live, logs, copied):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("by_symlink", [False, True])
def test_a_tablespace_elsewhere_is_refused_or_covered_and_the_live_one_is_never_opened(
    base, run_dir, binary, by_symlink
):
    """DATA DIRECTORY names the live file by its absolute path, in .isl files, symlinks and the redo log."""
    volume, clone, link = base / "volume3", base / "clone3", base / "link3"
    elsewhere = volume / "elsewhere"
    elsewhere.mkdir(parents=True)
    link.symlink_to(elsewhere)
    named = link if by_symlink else elsewhere
    os.chown(elsewhere, server_user().pw_uid, server_user().pw_gid)
    try:
        with private_server(volume / "data") as server:
            server.query("CREATE DATABASE shop")
            for engine in ("InnoDB", "MyISAM"):
                server.query(f"CREATE TABLE shop.{engine} (a INT) ENGINE={engine} DATA DIRECTORY='{named}'")
                server.query(f"INSERT INTO shop.{engine} VALUES (1)")
            with connect(Credentials(socket=server.socket)) as connection:
                layout = read_layout(connection, identify(connection))
            with frozen(server):
                subprocess.run(["cp", "-a", str(volume), str(clone)], check=True)
            arguments = {"settings": layout.settings, "memory_bytes": MEMORY, "run_dir": run_dir}
            with (
                pytest.raises(MissingRequirementError, match="outside the copy"),
                throwaway(binary, str(clone / "data"), **arguments),
            ):
                pass
            # Later than the copy: whoever sees it has opened the live file.
            server.query("INSERT INTO shop.InnoDB VALUES (2)")
            server.query("INSERT INTO shop.MyISAM VALUES (2)")
            originals = {str(volume / "data"): str(clone / "data"), str(elsewhere): str(clone / "elsewhere")}
            with throwaway(binary, str(clone / "data"), originals=originals, **arguments) as started:
                with started.connect() as connection:
                    assert connection.rows("SELECT a FROM shop.InnoDB") == [{"a": 1}]
                    assert connection.rows("SELECT a FROM shop.MyISAM") == [{"a": 1}]
                    connection.execute("INSERT INTO shop.InnoDB VALUES (3)")
                    connection.execute("INSERT INTO shop.MyISAM VALUES (3)")
                assert check(started).failures == ()
                assert started.shutdown()
            for engine in ("InnoDB", "MyISAM"):
                assert server.query(f"SELECT a FROM shop.{engine}") == ((1,), (2,))
            server.kill()
            server.start()
            assert server.query("SELECT a FROM shop.InnoDB") == ((1,), (2,))
            with open("/proc/self/mountinfo") as file:
                assert str(volume) not in file.read()
    finally:
        link.unlink()
        for folder in (volume, clone):
            shutil.rmtree(folder, ignore_errors=True)
