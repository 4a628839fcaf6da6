"""A volume whose objects are in an S3 store, with a trash: uploads that fail, keys that nobody sees, freed space."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from snapmgr.api import StorageError
from snapmgr.testing import fingerprint
from snapmgr.testing.lab import new_id
from snapmgr.testing.trees import same
from snapmgr_juicefs import JuicefsConfig
from support import faults
from support.juicefs import JuicefsVolume, juicefs_volume
from support.juicefslab import JuicefsLab
from support.objectstore import ACCESS_KEY, SECRET_KEY, ObjectStore, object_store
from support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.needs("root", "juicefs")


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture(scope="module")
def volume(store: ObjectStore) -> Iterator[JuicefsVolume]:
    with juicefs_volume(
        storage="s3",
        bucket=store.bucket(),
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        format_options=("--trash-days", "1"),
        mount_options=("--writeback",),
    ) as made:
        yield made


def test_a_store_that_refuses_for_a_while(store: ObjectStore, volume: JuicefsVolume) -> None:
    lab = JuicefsLab(volume)
    origin = lab.make_origin()
    store.fail(503)
    try:
        (origin / "file").write_bytes(os.urandom(1 << 20))
        before = fingerprint(origin)
        with lab.backend().arm((lab.volume(origin),), new_id()) as armed:
            armed.launched = True
            (shot,) = armed.fire(time.monotonic() + 60)
        with pytest.raises(StorageError, match="still only in the cache") as caught:
            lab.backend().settle((shot.ref,), 1.0)
        assert SECRET_KEY not in f"{caught.value} {caught.value.hint}"
    finally:
        store.fail(0)
    # The client's own next try is a minute away at most; one that is started anew tries at once.
    volume.unmount()
    volume.mount("--writeback")
    lab.backend().settle((shot.ref,), 60)
    volume.unmount()
    with volume.mounted(cache=volume.folder / "another-cache"), lab.attached(shot.ref, writable=False) as reached:
        same(before, fingerprint(reached))
    volume.mount("--writeback")


def test_deleting_past_the_trash_frees_the_space(store: ObjectStore, volume: JuicefsVolume) -> None:
    through, past = JuicefsLab(volume), JuicefsLab(volume, JuicefsConfig(ask_metadata=False, skip_trash=True))

    def stored() -> int:
        volume.juicefs("gc", "--delete", volume.meta_url)
        return store.statistics(count=True).object_bytes or 0

    for lab, frees in ((through, False), (past, True)):
        origin = lab.make_origin()
        warned = any("in its trash for 1 day" in text for text in lab.volume(origin).warnings)
        assert warned != frees
        (origin / "file").write_bytes(os.urandom(4 << 20))
        ref = lab.take_one(origin)
        # From here on the snapshot alone has the data.
        volume.juicefs("rmr", "--skip-trash", str(origin))
        assert stored() >= 4 << 20
        before = stored()
        lab.backend().delete(ref, wait="name")
        if frees:
            wait_until(lambda before=before: stored() <= before - (4 << 20), 60)  # type: ignore[misc]
        else:
            assert stored() >= before


def test_nobody_sees_the_keys(volume: JuicefsVolume, tmp_path: Path) -> None:
    origin = volume.point / "data"
    origin.mkdir()
    (origin / "plain").write_bytes(b"content")
    config = tmp_path / "snapmgr.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\nscratch_dir = "{tmp_path}/scratch"\n'
        f'[job.files]\nsource = "directory"\npath = "{origin}"\n'
        f'[backend.juicefs]\nmeta_url = "{volume.meta_url}"\n'
    )
    said = ""
    for command in (("backup", "files"), ("show", "latest"), ("list",), ("doctor",), ("verify", "latest")):
        for form in ((), ("--json",)):
            done = faults.run(config, *command, *form)
            said += done.stdout + done.stderr
    assert json.loads(faults.run(config, "list", "--json").stdout)["snapshots"][0]["state"] == "ready"
    written = "".join(
        path.read_text(errors="replace")
        for folder in (tmp_path / "state", volume.point / ".snapmgr-juicefs")
        for path in folder.rglob("*")
        if path.is_file()
    )
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret not in said
        assert secret not in written
