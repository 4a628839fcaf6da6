"""Isolates a copied datadir from the live data, so that a server can start on it.

Absolute paths in a copy are dangerous: a server started on it would open the *live* tablespace or binary log that they
name. They occur in symlinks, in InnoDB's .isl files and redo log (DATA DIRECTORY), in settings, and in the binary log's
index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.datadir.layout import data_files
from snapmgr.mysql.datadir.plainfile import open_plain, read_isl
from snapmgr.mysql.datadir.settings import FOLDER_SETTINGS
from snapmgr.mysql.datadir.tablespace import dictionary_paths, page_size
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Collection

Originals = Mapping[str, "str | os.PathLike[str]"]
"""Folders by their path on the source's server, and the copy of each: the datadir and every place outside it."""


class IsolatedCopy(Struct, frozen=True, kw_only=True):
    """An isolated copy, as its server will see it."""

    datadir: str
    home: str
    """The datadir, as we see it."""
    settings: dict[str, str]
    """The source's, completed from the files."""
    paths: dict[str, str]
    """FOLDER_SETTINGS, as its server will see them."""
    log_bin_options: tuple[str, ...]
    covers: tuple[tuple[str, str], ...]
    """Folders of the copy, each with the original folder to mount it over for this server; usually none."""


def isolate_copy(
    datadir: str, settings: Mapping[str, str], originals: Originals, *, fresh_logs: str | None = None
) -> IsolatedCopy:
    """Isolate the copy at `datadir` and return how to start a server on it. Changes only the copy.

    Args:
        datadir: the copy, resolved.
        settings: `Layout.settings` of the source: paths relative to the datadir.
        originals: see `snapmgr.mysql.server.throwaway`.
        fresh_logs: folder for new binary logs where the source's are not in the copy; by default the datadir.

    Raises MissingRequirementError for absolute paths in the copy that `originals` does not cover.
    """
    with suppress(FileNotFoundError):
        # MySQL writes a new one: two servers must not share a UUID.
        os.unlink(os.path.join(datadir, "auto.cnf"))
    if "innodb_page_size" not in settings and (size := page_size(os.path.join(datadir, "ibdata1"))):
        # The snapshot is of a stopped server, which we could not ask.
        settings = {**settings, "innodb_page_size": str(size)}
    if folders := settings.get("innodb_directories"):
        settings = {**settings, "innodb_directories": narrow_folders(folders, originals)}
    external = absolute_paths(datadir, settings)
    homes = {path for path, copy in originals.items() if os.path.realpath(copy) == datadir}
    covers: tuple[tuple[str, str], ...] = ()
    if external or set(originals) - homes:
        _check_covered(external, originals)
        # An outer folder first; otherwise it would hide the inner one.
        covers = tuple((os.path.realpath(copy), path) for path, copy in sorted(originals.items()))
    seen_as = min(homes) if covers and homes else datadir
    paths = {}
    for name in FOLDER_SETTINGS:
        if name in settings:
            paths[name] = os.path.normpath(os.path.join(seen_as, settings[name]))
    return IsolatedCopy(
        datadir=seen_as,
        home=datadir,
        settings=dict(settings),
        paths=paths,
        log_bin_options=_log_bin_options(_Folders(datadir, seen_as, originals), settings, fresh_logs or seen_as),
        covers=covers,
    )


def narrow_folders(folders: str, held: Collection[str]) -> str:
    """Given innodb_directories ("/a;/b"), return it without folders outside the copy: those hold live tablespaces.

    A folder of which only parts are `held` (folders of the source in the copy) becomes those parts.
    """
    kept: list[str] = []
    for part in filter(None, (part.strip() for part in folders.split(";"))):
        folder = os.path.normpath(part)
        if not folder.startswith("/") or lies_in(folder, *held) or lies_in(os.path.realpath(folder), *held):
            kept.append(folder)
        else:
            kept += [one for one in held if lies_in(one, folder, os.path.realpath(folder))]
    return ";".join(dict.fromkeys(kept))


def absolute_paths(datadir: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return every absolute path that a server on `datadir` would follow, and where it occurs."""
    found = {}
    for name in data_files(settings.get("innodb_data_file_path", "")):
        if name.startswith("/"):
            found[name] = "innodb_data_file_path"
    for name in settings.get("innodb_directories", "").split(";"):
        if name.strip().startswith("/"):
            found[name.strip()] = "innodb_directories"
    # A path that does not exist (a dropped table's, say) leads nowhere.
    for path in filter(os.path.lexists, dictionary_paths(datadir)):
        found[path] = "MySQL's data dictionary"
    return found | _links(datadir)


def _links(datadir: str) -> dict[str, str]:
    """Return the absolute targets of symlinks and .isl files, and the file of each."""
    found = {}
    for folder in (datadir, *(entry.path for entry in os.scandir(datadir) if entry.is_dir(follow_symlinks=False))):
        for entry in os.scandir(folder):
            if entry.is_symlink():
                target = os.readlink(entry.path)
            elif entry.name.endswith(".isl"):
                target = read_isl(entry.path)
            else:
                continue
            if target.startswith("/"):
                found[target] = entry.path
    return found


def _check_covered(external: Mapping[str, str], originals: Originals) -> None:
    for path, where in sorted(external.items()):
        # The covers lie over resolved folders; a path through a symlink reaches them too.
        if not (lies_in(path, *originals) or lies_in(os.path.realpath(path), *originals)):
            raise MissingRequirementError(
                f"{where} names {path}, which is outside the copy: a server on the copy might open the live data",
                hint="you can mount and copy such a snapshot, but not verify it here",
            )
    for folder in originals:
        if not os.path.isdir(folder):
            raise MissingRequirementError(
                f"the copy holds absolute paths below {folder}, but that folder does not exist here",
                hint=f"mkdir -p {folder} (it may stay empty)",
            )


class _Folders(Struct, frozen=True):
    """Finds folders of the copy."""

    datadir: str
    seen_as: str
    """The datadir, as the server will see it."""
    originals: Originals

    def seen(self, folder: str) -> str:
        """Given a folder relative to the datadir, return its path as the server will see it."""
        return os.path.normpath(os.path.join(self.seen_as, folder))

    def real(self, folder: str) -> str | None:
        """Given a folder relative to the datadir, return its path for us; None if it is not in the copy."""
        if self.seen_as == self.datadir:
            path = os.path.normpath(os.path.join(self.datadir, folder))
            if self.originals and not lies_in(path, self.datadir):
                # All of the copy is in its datadir. The same relative path from the copy may lead to the live logs.
                return None
        else:
            # Never the path itself: the live folder is there.
            seen = self.seen(folder)
            holders = [outer for outer in self.originals if lies_in(seen, outer)]
            if not holders:
                return None
            outer = max(holders, key=len)
            path = os.path.join(self.originals[outer], os.path.relpath(seen, outer))
        return path if os.path.isdir(path) else None


def _log_bin_options(folders: _Folders, settings: Mapping[str, str], fresh_logs: str) -> tuple[str, ...]:
    """Return the options for the binary log, and rewrite its index to name the copy's own files.

    With an absolute name in it the server could mark, truncate or purge the live binary log.
    """
    base = settings.get("log_bin_basename")
    if base is None:
        return ("--skip-log-bin",)
    folder, name = os.path.split(base)
    index_folder, index_name = os.path.split(settings.get("log_bin_index", f"{base}.index"))
    if folders.real(folder) is None:
        # Not in the copy: the server starts new logs, or reports that it needs the old ones.
        return (f"--log-bin={fresh_logs}/{name}", f"--log-bin-index={fresh_logs}/{index_name}")
    logs, index_home = folders.seen(folder), folders.real(index_folder)
    if index_home is None:
        index_folder, index_home = "", folders.datadir
    index = os.path.join(index_home, index_name)
    if os.path.islink(index) or (os.path.exists(index) and not os.path.isfile(index)):
        raise MissingRequirementError(
            f"the binary log's index {index} is not a regular file: a server on the copy might change live binary logs",
            hint="you can mount and copy such a snapshot, but not verify it here",
        )
    with suppress(FileNotFoundError), open_plain(index, write=True) as file:
        names = [os.path.basename(line) for line in file.read().splitlines() if line]
        file.seek(0)
        file.writelines(os.path.join(os.fsencode(logs), line) + b"\n" for line in names)
        file.truncate()
    return (f"--log-bin={logs}/{name}", f"--log-bin-index={folders.seen(os.path.join(index_folder, index_name))}")
