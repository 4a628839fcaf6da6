"""Reads and writes results: a folder with ``run.json`` and one file per sample, which is never changed.

Measuring only adds files; reports and comparisons only read them. An unreadable file is reported as a problem, never
skipped silently.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from snapmgr.bench.results import folder as resultsfolder
from snapmgr.bench.results.documents import Run, Sample, require_whole
from snapmgr.contract.errors import BusyError, CatalogError, ConfigError, MissingRequirementError, NotFoundError
from snapmgr.system.files import is_abandoned, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SCHEMA = 1
_RUN = "run.json"
_SAMPLE = re.compile(r"(?P<number>[0-9]{4,})-[a-z0-9+.-]+\.json")
_READ_ONLY = 0o444
# A sample with layouts and latency histograms has some hundred KB.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ReadResults:
    """What some folders of results hold."""

    runs: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that cannot be used, with its name."""


class Results:
    """One folder of results.

    Args:
        folder: where it is, or is to be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locked: os.stat_result | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if necessary, and lock it against other runs.

        Raises ConfigError if nothing can be written there or it holds something else, and BusyError if another run
        writes to it: then nothing was changed.
        """
        made = not os.path.exists(self.folder)
        fd = resultsfolder.opened(self.folder)
        try:
            _lock(fd, self.folder)
            try:
                self._require_own()
                resultsfolder.require_fit(self.folder)
                for path in filter(is_abandoned, sorted(self.folder.iterdir())):
                    path.unlink()
                self._locked = os.fstat(fd)
                yield
            finally:
                # A run that could not begin leaves nothing: what is not empty stays.
                if made:
                    with suppress(OSError):
                        self.folder.rmdir()
        finally:
            os.close(fd)

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """Yield an empty folder in it for the temporary files of a sample; it is removed afterwards.

        Raises ConfigError if something else has its name, and CatalogError or NoRoomError if it cannot be made.
        """
        self._require_same()
        with resultsfolder.work_folder(self.folder) as folder:
            yield folder

    def require_writable(self) -> None:
        """Raise CatalogError or NoRoomError if a sample could not be written any more."""
        self._require_same()
        resultsfolder.require_writable(self.folder)

    def _require_own(self) -> None:
        names = self._names()
        if _RUN not in names and (others := [name for name in names if not is_abandoned(self.folder / name)]):
            raise ConfigError(f"{self.folder} holds {others[0]}, and no results", hint="name a new folder with -o")

    def _require_same(self) -> None:
        """Raise CatalogError if the folder is not the one any more that was locked: unmounted, or replaced."""
        try:
            same = self._locked is None or os.path.samestat(self._locked, os.stat(self.folder))
        except OSError as error:
            raise resultsfolder.unwritable(self.folder, error, self.folder) from None
        if not same:
            raise CatalogError(
                f"{self.folder} was replaced while the run was going on",
                hint="check whether its file system was unmounted; the samples are in the original folder",
            )

    def begin(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``run.json`` of a new run and return it; the folder holds none."""
        document = {"schema": SCHEMA, **run}
        _write(self.folder / _RUN, document, Run)
        return document

    def run(self) -> dict[str, Any] | None:
        """Return ``run.json``; None if there is none. Raises CatalogError."""
        path = self.folder / _RUN
        return _read(path, Run) if path.exists() else None

    def write(self, sample: Mapping[str, Any]) -> Path:
        """Add a sample and return its file. Raises CatalogError, NoRoomError; then there is no file.

        Its schema and its id, which is unique in this folder, are given here.
        """
        self._require_same()
        number = max((int(match["number"]) for match in map(_SAMPLE.fullmatch, self._names()) if match), default=0) + 1
        name = f"{number:04d}-{sample['scenario']}-{sample['stack']}"
        path = self.folder / f"{name}.json"
        _write(path, {**sample, "schema": SCHEMA, "id": name}, Sample)
        return path

    def samples(self) -> list[dict[str, Any]]:
        """Return all samples in the order in which they were made. Raises CatalogError if one cannot be read."""
        found = read([self.folder])
        if found.problems:
            raise CatalogError("\n".join(found.problems))
        return found.samples

    def _names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


def read(paths: Sequence[Path]) -> ReadResults:
    """Return what several folders hold; a sample that lies in two of them counts once.

    `ReadResults.problems` names the files that cannot be used. Raises NotFoundError for a folder that does not exist,
    and ConfigError for one that holds no results.
    """
    runs: list[dict[str, Any]] = []
    samples: dict[tuple[str, str], dict[str, Any]] = {}
    problems: list[str] = []
    for folder in paths:
        files = [path for path in _files(folder) if path.name == _RUN or _SAMPLE.fullmatch(path.name)]
        if not files:
            raise ConfigError(f"{folder} holds no results", hint="results come from: snapmgr bench run -o FOLDER")
        if files[0].name != _RUN and all(path.name != _RUN for path in files):
            problems.append(f"{folder / _RUN} is missing: the arguments of the run are unknown")
        for path in files:
            try:
                if path.name == _RUN:
                    runs.append(_read(path, Run))
                else:
                    sample = _read(path, Sample)
                    samples.setdefault((sample["run"], sample["id"]), sample)
            except CatalogError as error:
                problems.append(error.message)
    return ReadResults(runs=runs, samples=list(samples.values()), problems=problems)


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"another run is writing its results to {folder}", hint="wait for it, or name another folder with -o"
        ) from None


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        raise NotFoundError(f"the folder {folder} does not exist") from None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is not a folder of results", hint="name the folder, not a file in it") from None
    except PermissionError:
        raise MissingRequirementError(f"permission denied: cannot read {folder}") from None


def _write(path: Path, document: dict[str, Any], kind: type) -> None:
    # What could not be read again must not be written: better a traceback now than a lost sample later.
    require_whole(document, kind)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if path.exists():
        raise CatalogError(f"{path} exists already, and samples are never overwritten")
    try:
        replace_file(path, text.encode(), _READ_ONLY)
    except OSError as error:
        raise resultsfolder.unwritable(path, error, path.parent) from None


def _read(path: Path, kind: type) -> dict[str, Any]:
    """Return one document, checked. Raises CatalogError with the file's name."""
    try:
        # Links and FIFOs are never ours; the owner of results may be another user.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise CatalogError(f"{path} cannot be read: {why}") from None
    if len(data) > _MAX_BYTES:
        raise CatalogError(f"{path} is damaged: it is larger than any sample ({_MAX_BYTES} bytes)")
    try:
        document = msgspec.json.decode(data)
        schema = document.get("schema") if isinstance(document, dict) else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CatalogError(f"{path} is damaged: {error}") from None
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise CatalogError(f"{path} is damaged: it has no schema")
    if schema > SCHEMA:
        raise CatalogError(
            f"{path} was made by a newer snapmgr (schema {schema}; this one reads {SCHEMA}): install that version"
        )
    if schema < SCHEMA:
        raise CatalogError(
            f"{path} was made by an older snapmgr (schema {schema}; this one reads {SCHEMA}): measure again"
        )
    try:
        require_whole(document, kind)
    except ValueError as error:
        raise CatalogError(f"{path} is damaged: {error}") from None
    return dict(document)
