"""The server program that `doctor` names for a verification: one that can open the data, as `verify` chooses it."""

from __future__ import annotations

import pytest

from support.scene import btrfs_scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadb-10.11", "mariadb-11.8")


def test_doctor_names_a_program_that_opens_the_data():
    with btrfs_scene(kind="mariadb-11.8") as scene:
        found = scene.run("doctor", "demo")
        assert found.returncode == 0
        # The older one of PATH, which would refuse these data, is not meant.
        assert "can be verified by mariadb 11.8" in found.stdout

        scene.configure('verify.server = "/usr/sbin/mariadbd"\nafter_backup = ["verify"]')
        found = scene.run("doctor", "demo")
        assert found.returncode == 7
        assert "cannot be verified here: the data were written by mariadb 11.8" in found.stdout

        datadir = scene.server.query("SELECT @@datadir")[0][0]
        scene.server.stop()
        stopped = f'source = "mysql"\nquiesce = "stopped"\ndatadir = "{str(datadir).rstrip("/")}"\n'
        scene.configure(text=f'[job.demo]\n{stopped}verify.server = "/usr/sbin/mariadbd"\nafter_backup = ["verify"]')
        found = scene.run("doctor", "demo")
        assert found.returncode == 7
        assert "cannot be verified here: the data were written by mariadb 11.8" in found.stdout
