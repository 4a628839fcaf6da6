"""Findings about kernels whose ext4 blocks reads behind direct writes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from snapmgr.contract.errors import NotFoundError
from snapmgr.doctor import examine as doctor

JOB = SimpleNamespace(name="demo")


def told(monkeypatch, *, release="5.4.0-150-generic", fs_type="ext4", method="O_DIRECT"):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(doctor, "find_target", lambda _path: SimpleNamespace(mount=SimpleNamespace(fs_type=fs_type)))
    return list(doctor._examine_kernel(JOB, "/var/lib/mysql", method))


def test_warned_where_it_applies(monkeypatch):
    (found,) = told(monkeypatch)
    assert found.level == "note"
    assert "kernel 5.4.0-150-generic has the ext4 regression" in found.what
    assert "innodb-io" in found.hint
    assert len(told(monkeypatch, method="O_DIRECT_NO_FSYNC", release="4.9.1")) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"release": "4.8.17"},
        {"release": "5.6.0"},
        {"release": "6.1.0-31-amd64"},
        {"release": "unheard-of"},
        {"fs_type": "xfs"},
        {"method": "fsync"},
        {"method": ""},
    ],
)
def test_nothing_elsewhere(monkeypatch, given):
    assert told(monkeypatch, **given) == []


def test_storage_that_cannot_be_looked_at_is_somebody_elses_finding(monkeypatch):
    def gone(_path):
        raise NotFoundError("gone")

    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="5.4.0"))
    monkeypatch.setattr(doctor, "find_target", gone)
    assert list(doctor._examine_kernel(JOB, "/var/lib/mysql", "O_DIRECT")) == []
