"""Maps the folders of a snapshot to their places in the destination of a restore. Pure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.access.attach import place_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from snapmgr.catalog.manifest import Manifest


class MappedFolder(Struct, frozen=True, kw_only=True):
    """A folder that is copied as a whole."""

    original: str
    """Its path in the source."""
    source: Path
    """Its path in the snapshot."""
    target: str
    """Its path from the destination; "" is the destination itself."""


class FolderMap(Struct, frozen=True, kw_only=True):
    """The folders that are copied, and the place of every folder of the source afterwards."""

    folders: tuple[MappedFolder, ...]
    """An outer folder comes before those inside it."""
    copies: Mapping[str, Path]
    """For every folder of the source, its path in the snapshot."""

    def moved(self, path: str, dest: str) -> str:
        """Given an absolute path of the source, return its path in `dest`; unchanged if it is not in the snapshot."""
        copy = place_of(path, self.copies)
        if copy is None:
            return path
        holder = max(
            (folder for folder in self.folders if _within(copy, folder.source)),
            key=lambda folder: len(folder.source.parts),
        )
        return os.path.normpath(os.path.join(dest, holder.target, os.path.relpath(copy, holder.source)))

    def apart(self, outer: MappedFolder) -> frozenset[str]:
        """Return the paths in `outer` that other mapped folders fill."""
        return frozenset(
            os.path.relpath(inner.target, outer.target or ".")
            for inner in self.folders
            if inner is not outer and _within(Path(inner.target), Path(outer.target))
        )


def map_folders(copies: Mapping[str, Path]) -> FolderMap:
    """Given the path in the snapshot of every folder of the source (its own first), decide the target of each.

    A folder inside another one's copy is copied with it. A folder that was inside another one, but on another volume,
    goes back into that one. If only one folder is left, it becomes the destination itself; otherwise each one gets a
    folder with its name in the destination.
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
    """Return the same for a snapshot that is not attached, from its manifest alone."""
    member = manifest.members[0]
    copies = {manifest.path: Path("/0", member.subpath)}
    for number, member in enumerate(manifest.members):
        for path, subpath in member.places.items():
            copies.setdefault(path, Path("/", str(number), subpath))
    return map_folders(copies)


def _within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _outer(original: str, roots: Mapping[str, Path]) -> str | None:
    # A note that somebody else wrote may contain "..": a folder that is put into another one must stay inside it.
    path = Path(os.path.normpath(original))
    holders = [other for other in roots if other != original and _within(path, Path(os.path.normpath(other)))]
    return max(holders, key=len, default=None)


def _free(name: str, taken: Collection[str]) -> str:
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{name}-{number}"
    return free
