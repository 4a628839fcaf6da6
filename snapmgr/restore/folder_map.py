"""Which folders of a snapshot are copied, and where each goes: pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.attach import place_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from snapmgr.catalog.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class MappedFolder:
    """A folder that is copied whole."""

    original: str
    """As the source called it."""
    source: Path
    """Where its copy in the snapshot is."""
    target: str
    """Where it goes, from the destination; "" is the destination itself."""


@dataclass(frozen=True, kw_only=True)
class FolderMap:
    """What is copied where, and where every folder of the source is afterwards."""

    folders: tuple[MappedFolder, ...]
    """An outer one before what goes into it."""
    copies: Mapping[str, Path]

    def moved(self, path: str, dest: str) -> str:
        """Given an absolute path of the source, return where it is in `dest`; itself if the snapshot has it not."""
        copy = place_of(path, self.copies)
        if copy is None:
            return path
        holder = max(
            (folder for folder in self.folders if _within(copy, folder.source)),
            key=lambda folder: len(folder.source.parts),
        )
        return os.path.normpath(os.path.join(dest, holder.target, os.path.relpath(copy, holder.source)))

    def apart(self, outer: MappedFolder) -> frozenset[str]:
        """Return what of a folder is filled by others, from its own folder."""
        return frozenset(
            os.path.relpath(inner.target, outer.target or ".")
            for inner in self.folders
            if inner is not outer and _within(Path(inner.target), Path(outer.target))
        )


def map_folders(copies: Mapping[str, Path]) -> FolderMap:
    """Given every folder of the source and where its copy is (the source's own first), say what goes where.

    What lies in another folder's copy comes with it. What lay in another folder, but on another volume, goes back into
    that. Is copies only one folder left, it becomes the destination itself; else each one gets a folder in it, by its
    name.
    """
    roots: dict[str, Path] = {}
    for original, copy in copies.items():
        if not any(_within(copy, other) and copy != other for other in copies.values()) and copy not in roots.values():
            roots[original] = copy
    inner = {original: outer for original in roots if (outer := _outer(original, roots)) is not None}
    bases = [original for original in roots if original not in inner]
    targets: dict[str, str] = {}
    for original in bases:
        name = os.path.basename(os.path.normpath(original)) or "root"
        targets[original] = _free(name, targets.values()) if len(bases) > 1 else ""
    for original in sorted(inner, key=len):
        targets[original] = os.path.join(targets[inner[original]], os.path.relpath(original, inner[original]))
    folders = tuple(
        MappedFolder(original=original, source=roots[original], target=targets[original]) for original in targets
    )
    return FolderMap(folders=folders, copies=copies)


def expected_map(manifest: Manifest) -> FolderMap:
    """Return the same for a snapshot that is not attached: by what its manifest says."""
    member = manifest.members[0]
    copies = {manifest.path: Path("/0", member.subpath)}
    for number, member in enumerate(manifest.members):
        for path, subpath in member.places.items():
            copies.setdefault(path, Path("/", str(number), subpath))
    return map_folders(copies)


def _within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _outer(original: str, roots: Mapping[str, Path]) -> str | None:
    # Without "..", as a stranger's note may have it: what is put into another folder must not leave it again.
    path = Path(os.path.normpath(original))
    holders = [other for other in roots if other != original and _within(path, Path(os.path.normpath(other)))]
    return max(holders, key=len, default=None)


def _free(name: str, taken: Collection[str]) -> str:
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{name}-{number}"
    return free
