"""Makes a copied datadir fit for a server of its own: where its parts are now, and nothing leads to the live data.

Absolute paths in a copy are dangerous, not only wrong: a server started on it would open the *live* tablespace or
binary log that they name. They are in symlinks, in InnoDB's .isl files and redo log (DATA DIRECTORY), in settings, and
in the binary log's index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.datadir.layout import data_files
from snapmgr.mysql.datadir.plainfile import open_plain, read_isl
from snapmgr.mysql.datadir.tablespace import dictionary_paths, page_size
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Collection

_FOLDERS = (
    "innodb_data_home_dir",
    "innodb_log_group_home_dir",
    "innodb_undo_directory",
    "innodb_doublewrite_dir",
    "aria_log_dir_path",
)

Originals = Mapping[str, "str | os.PathLike[str]"]
"""Folders as the source's server knew them, and the copy of each: the datadir and every place outside."""


@dataclass(frozen=True, kw_only=True)
class IsolatedCopy:
    """A prepared copy, as its server will see it."""

    datadir: str
    home: str
    """The datadir, where it is for us."""
    settings: dict[str, str]
    """The source's, completed by what the files tell."""
    paths: dict[str, str]
    """Settings that are folders."""
    log_bin_options: tuple[str, ...]
    covers: tuple[tuple[str, str], ...]
    """Folders of the copy, and the original folders that they must be mounted over for this server; usually none."""


def isolate_copy(
    datadir: str, settings: Mapping[str, str], originals: Originals, *, fresh_logs: str | None = None
) -> IsolatedCopy:
    """Prepare the copy at `datadir` and return how to start a server on it. Changes only the copy.

    Args:
        datadir: the copy, resolved.
        settings: `Layout.settings` of the source: paths relative to the datadir.
        originals: see `snapmgr.mysql.server.throwaway`.
        fresh_logs: folder for new binary logs where the source's are not in the copy; by default the datadir.

    Raises MissingRequirementError for absolute paths in the copy that `originals` does not cover.
    """
    with suppress(FileNotFoundError):
        # MySQL writes a new one: two servers must not have one UUID.
        os.unlink(os.path.join(datadir, "auto.cnf"))
    if "innodb_page_size" not in settings and (size := page_size(os.path.join(datadir, "ibdata1"))):
        # Taken from a stopped server, which could not be asked.
        settings = {**settings, "innodb_page_size": str(size)}
    if folders := settings.get("innodb_directories"):
        settings = {**settings, "innodb_directories": narrow_folders(folders, originals)}
    leads = absolute_paths(datadir, settings)
    homes = {path for path, copy in originals.items() if os.path.realpath(copy) == datadir}
    covers: tuple[tuple[str, str], ...] = ()
    if leads or set(originals) - homes:
        _check_covered(leads, originals)
        # An outer folder first, or it would hide the inner one.
        covers = tuple((os.path.realpath(copy), path) for path, copy in sorted(originals.items()))
    seen_as = min(homes) if covers and homes else datadir
    paths = {}
    for name in _FOLDERS:
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
    """Given innodb_directories ("/a;/b"), return it without what is not in the copy: the live tablespaces are there.

    A folder of which only parts are `held` (folders of the source) becomes those parts.
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
    """Return every absolute path that a server on `datadir` would follow, and where it stands."""
    found = {}
    for name in data_files(settings.get("innodb_data_file_path", "")):
        if name.startswith("/"):
            found[name] = "innodb_data_file_path"
    for name in settings.get("innodb_directories", "").split(";"):
        if name.strip().startswith("/"):
            found[name.strip()] = "innodb_directories"
    # What is not there (a dropped table's, say) can lead nowhere.
    for path in filter(os.path.lexists, dictionary_paths(datadir)):
        found[path] = "MySQL's data dictionary"
    return found | _links(datadir)


def _links(datadir: str) -> dict[str, str]:
    """Return the absolute aims of symlinks and .isl files, and where they stand."""
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


def _check_covered(leads: Mapping[str, str], originals: Originals) -> None:
    for path, where in sorted(leads.items()):
        # The covers lie over resolved folders; who named one by a symlink reaches it all the same.
        if not (lies_in(path, *originals) or lies_in(os.path.realpath(path), *originals)):
            raise MissingRequirementError(
                f"{where} names {path}, which lies outside of the copy: a server on it might open the live data",
                hint="such a snapshot can be mounted and copied, but not verified here",
            )
    for folder in originals:
        if not os.path.isdir(folder):
            raise MissingRequirementError(
                f"the copy holds absolute paths below {folder}, and there is no such folder here",
                hint=f"mkdir -p {folder} (it may stay empty)",
            )


@dataclass(frozen=True)
class _Folders:
    """Where the folders of the copy are."""

    datadir: str
    seen_as: str
    """The datadir, as the server will see it."""
    originals: Originals

    def seen(self, folder: str) -> str:
        """Given a folder from the datadir, return its path as the server will see it."""
        return os.path.normpath(os.path.join(self.seen_as, folder))

    def real(self, folder: str) -> str | None:
        """Given a folder from the datadir, return where it is; None if it is not in the copy."""
        if self.seen_as == self.datadir:
            path = os.path.normpath(os.path.join(self.datadir, folder))
            if self.originals and not lies_in(path, self.datadir):
                # All of the copy is in its datadir. The same way from the copy may lead to the live logs.
                return None
        else:
            # Never the path itself: that is where the live one is.
            seen = self.seen(folder)
            holders = [outer for outer in self.originals if lies_in(seen, outer)]
            if not holders:
                return None
            outer = max(holders, key=len)
            path = os.path.join(self.originals[outer], os.path.relpath(seen, outer))
        return path if os.path.isdir(path) else None


def _log_bin_options(folders: _Folders, settings: Mapping[str, str], fresh_logs: str) -> tuple[str, ...]:
    """Return the options for the binary log, with its index rewritten to name the copy's own files.

    An absolute name in it would let the server mark, truncate or purge the live binary log.
    """
    base = settings.get("log_bin_basename")
    if base is None:
        return ("--skip-log-bin",)
    folder, name = os.path.split(base)
    index_folder, index_name = os.path.split(settings.get("log_bin_index", f"{base}.index"))
    if folders.real(folder) is None:
        # Not in the copy: the server starts new ones, or says that it needs the old ones.
        return (f"--log-bin={fresh_logs}/{name}", f"--log-bin-index={fresh_logs}/{index_name}")
    logs, index_home = folders.seen(folder), folders.real(index_folder)
    if index_home is None:
        index_folder, index_home = "", folders.datadir
    index = os.path.join(index_home, index_name)
    if os.path.islink(index) or (os.path.exists(index) and not os.path.isfile(index)):
        raise MissingRequirementError(
            f"the binary log's index {index} is no regular file: a server on the copy might change live binary logs",
            hint="such a snapshot can be mounted and copied, but not verified here",
        )
    with suppress(FileNotFoundError), open_plain(index, write=True) as file:
        names = [os.path.basename(line) for line in file.read().splitlines() if line]
        file.seek(0)
        file.writelines(os.path.join(os.fsencode(logs), line) + b"\n" for line in names)
        file.truncate()
    return (f"--log-bin={logs}/{name}", f"--log-bin-index={folders.seen(os.path.join(index_folder, index_name))}")
