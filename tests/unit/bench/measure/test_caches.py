"""Emptying the folders in which a storage's client caches."""

from __future__ import annotations

from snapmgr.bench.measure import caches
from snapmgr.bench.measure.caches import drop_caches, empty


def test_files_go_at_any_depth_folders_stay_and_no_link_is_followed(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("x")
    cache = tmp_path / "cache"
    (cache / "raw" / "0").mkdir(parents=True)
    for path in (cache / "a", cache / "raw" / "0" / "b"):
        path.write_text("x")
    (cache / "link").symlink_to(other)
    (cache / "raw" / "file").symlink_to(other / "kept")
    assert empty([str(cache), str(tmp_path / "is not there")]) >= 3
    assert sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if not path.is_symlink()) == [
        "raw",
        "raw/0",
    ]
    assert (other / "kept").read_text() == "x"
    link = tmp_path / "folder"
    link.symlink_to(other)
    assert empty([str(link)]) == 0
    assert (other / "kept").exists()


def test_what_a_client_writes_a_moment_later_goes_too(tmp_path, monkeypatch):
    late = iter(["b", "c"])

    def sleep(_seconds):
        if name := next(late, ""):
            (tmp_path / "cache" / name).write_text("x")

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(caches.time, "sleep", sleep)
    monkeypatch.setattr(caches, "_DROP_CACHES", tmp_path / "drop")
    drop_caches([str(tmp_path / "cache")])
    assert list((tmp_path / "cache").iterdir()) == []
    assert (tmp_path / "drop").read_text() == "3\n"
