"""A storage with a directory job, watched from outside: what `doctor --fix` does there, and that it does it once."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.catalog.store import Catalog
from snapmgr.cli.main import main
from snapmgr.system.host import Process
from support.btrfs import run
from support.scene import Scene
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Manifest
    from support.storage import LoopFileSystem

DEAD = Process(pid=99_999_999, start_ticks=1, boot_id="another")
"""Nobody's identity."""


class Storage:
    """One storage with a directory job, seen from outside: what lies in snapmgr's folder on it."""

    def __init__(self, file_system: LoopFileSystem, folder: Path) -> None:
        self.scene = Scene(file_system, folder, None)
        self.kind = file_system.fs_type
        self.point = Path(file_system.point)
        self.source = self.point / "source"
        self.folder = self.point / (".snapmgr" if self.kind == "btrfs" else ".snapmgr-reflink")
        if self.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "create", self.source)
        else:
            self.source.mkdir()
        (self.source / "file").write_text("content")
        self.configure("state")

    def configure(self, state: str) -> None:
        """Let the job be of the state directory `state`."""
        self.scene.state = self.scene.folder / state
        check = '\n[job.demo.verify]\ncommand = ["grep", "content", "{}/file"]\n'
        self.scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{self.source}"{check}')

    def take(self, *options: str) -> Manifest:
        """Take a snapshot."""
        done = self.scene.run("backup", "demo", *options)
        assert done.returncode == 0, done.stderr
        return self.scene.entries()[-1].manifest

    def fix(self, *options: str, code: int = 0) -> dict[str, str]:
        """Run ``doctor --fix`` and again, which must change nothing; return what became of each kind of action."""
        planned = self.doctor("--fix", "--dry-run", *options)
        before = self.fingerprint()
        assert {action["result"] for action in planned["actions"]} <= {"would"}
        first = self.doctor("--fix", *options)
        assert first["exit_code"] == code, first
        if planned["actions"]:
            assert self.fingerprint() != before or code
        after = self.fingerprint()
        again = self.doctor("--fix", *options)
        assert [action for action in again["actions"] if action["result"] == "done"] == []
        assert again["exit_code"] == code
        assert self.fingerprint() == after
        return {action["kind"]: action["result"] for action in first["actions"]}

    def doctor(self, *options: str) -> Any:
        """Run doctor, in this process, and return its document."""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            main(["--config", str(self.scene.config_file), "doctor", "--json", *options])
        assert "bug" not in err.getvalue(), err.getvalue()
        return json.loads(out.getvalue())

    def problems(self, *options: str) -> list[str]:
        """Return what plain doctor complains of."""
        return [one["what"] for one in self.doctor(*options)["findings"] if one["level"] == "problem"]

    def fingerprint(self) -> dict[str, bytes | None]:
        """Return everything that is in the state directory, in snapmgr's folder and in the scratch directory."""
        seen: dict[str, bytes | None] = {}
        for top in (self.scene.state, self.folder, self.scene.scratch):
            for base, folders, files in os.walk(top):
                seen |= {os.path.join(base, name): None for name in folders}
                names = [os.path.join(base, name) for name in files if "locks" not in base]
                seen |= {name: Path(name).read_bytes() for name in names}
        return seen

    def manifests(self) -> dict[str, bytes]:
        """Return the manifests and verifications, as they are on disk."""
        files = sorted((self.scene.state / "snapshots").glob("*/*"))
        return {str(path.relative_to(self.scene.state)): path.read_bytes() for path in files}

    def catalog(self) -> Catalog:
        """Return the state directory."""
        return Catalog(self.scene.state)

    def remove(self, manifest: Manifest) -> None:
        """Delete a snapshot by hand."""
        path = self.folder / manifest.members[0].ref.name
        if self.kind == "btrfs":
            run("btrfs", "-q", "subvolume", "delete", path)
        else:
            shutil.rmtree(path)

    def move(self, path: Path, to: Path) -> None:
        """Move a snapshot by hand."""
        if self.kind == "btrfs":
            run("btrfs", "property", "set", path, "ro", "false")
        path.rename(to)
        if self.kind == "btrfs":
            run("btrfs", "property", "set", to, "ro", "true")

    def names(self) -> set[str]:
        """Return the names in snapmgr's folder."""
        return {path.name for path in self.folder.iterdir()} - {"snapmgr-reflink-store.json"}


@contextmanager
def watched_storage(kind: str) -> Iterator[Storage]:
    """Yield one on a file system of its own."""
    with loop_filesystem(kind, 400 << 20) as file_system, work_folder() as folder:
        storage = Storage(file_system, folder)
        try:
            yield storage
        finally:
            storage.scene.run("umount", "--all")
