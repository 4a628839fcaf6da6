"""Finds, checks and constructs storage backends; all are registered in the entry-point group ``snapmgr.backends``."""

from __future__ import annotations

import os
import sys
from functools import lru_cache, reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from snapmgr.contract.backend import API_VERSION, Backend
from snapmgr.contract.errors import ConfigError, MissingRequirementError, SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.contract.backend import Mounter, Runner

GROUP = "snapmgr.backends"
# A backend cannot have a name that is a value of the configuration.
_RESERVED = frozenset({"auto"})


class Plugin(Struct, frozen=True, kw_only=True):
    """An installed backend: its class, or the error why it cannot be used."""

    name: str
    distribution: str
    """Name and version of the package that installed it, "snapmgr 1.0"."""
    backend: type[Backend] | None
    error: SnapmgrError | None


def backend_names() -> tuple[str, ...]:
    """Return the names of the installed backends, without importing one."""
    return tuple(sorted(_points()))


def list_plugins() -> tuple[Plugin, ...]:
    """Return every installed backend by name, broken ones with their error."""
    plugins = []
    for name, points in sorted(_points().items()):
        backend: type[Backend] | None = None
        error: SnapmgrError | None = None
        try:
            backend = _load(points)
        except SnapmgrError as raised:
            error = raised
        plugins.append(Plugin(name=name, distribution=points[0].distribution, backend=backend, error=error))
    return tuple(plugins)


def load_backend(name: str) -> type[Backend]:
    """Return the class of one backend; no other one is imported.

    Raises ConfigError if none has this name, MissingRequirementError if a module that it needs is not installed, and
    SnapmgrError if it is broken or written for another version of the interface.
    """
    points = _points()
    if name not in points:
        known = ", ".join(sorted(points)) or "none: reinstall snapmgr, as its own backends are missing"
        raise ConfigError(f"there is no backend {name!r}", hint=f"installed backends: {known}")
    return _load(points[name])


def make_backend(name: str, config_table: Mapping[str, Any], runner: Runner, mounter: Mounter) -> Backend:
    """Given ``[backend.NAME]`` (an empty table for the defaults), return the backend, constructed.

    Raises ConfigError with the key's path if the table does not fit the backend's Config, and what `load_backend`
    raises.
    """
    kind = load_backend(name)
    return kind(_parse_config(name, kind.Config, config_table), runner, mounter)


class _Point(Struct, frozen=True, kw_only=True):
    """An entry point of our group."""

    name: str
    value: str
    """"module:attribute"."""
    info: str
    """The metadata folder of the distribution that has it."""

    @property
    def distribution(self) -> str:
        """As `Plugin.distribution`; only errors and lists need it, so it is read when it is asked for."""
        fields: dict[str, str] = {}
        for line in _lines(os.path.join(self.info, "METADATA")) or _lines(os.path.join(self.info, "PKG-INFO")):
            key, _, value = line.partition(":")
            fields.setdefault(key, value.strip())
        return f"{fields['Name']} {fields.get('Version', '?')}" if "Name" in fields else "an unknown distribution"

    @property
    def project(self) -> str:
        """The name of its distribution."""
        return self.distribution.partition(" ")[0]

    @property
    def title(self) -> str:
        """The beginning of an error's message."""
        return f"the backend {self.name} (of {self.distribution})"


_Folder = tuple[str, int]
"""A folder of modules, and when it was changed last, in ns."""


def _points() -> dict[str, list[_Point]]:
    return _points_in(tuple((folder or ".", _changed_ns(folder or ".")) for folder in dict.fromkeys(sys.path)))


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _points_in(folders: tuple[_Folder, ...]) -> dict[str, list[_Point]]:
    found: dict[str, list[_Point]] = {}
    seen: set[str] = set()
    for folder, _ in folders:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
        except OSError:
            continue
        for name in names:
            # As in importlib.metadata: of two versions of a distribution, Python imports the first on its path.
            project = name.partition("-")[0].lower().replace(".", "_")
            if project not in seen:
                _add_points(found, os.path.join(folder, name))
            seen.add(project)
    return found


def _add_points(found: dict[str, list[_Point]], info: str) -> None:
    """Add the entry points of a distribution, given its metadata folder.

    importlib.metadata does the same, but takes a tenth of a backup's time to be imported.
    """
    section = ""
    for line in _lines(os.path.join(info, "entry_points.txt"), among=GROUP):
        if line.startswith("["):
            section = line.strip("[]")
        elif section == GROUP and "=" in line:
            name, value = (part.strip() for part in line.split("=", 1))
            point = _Point(name=name, value=value, info=info)
            # An editable install beside a wheel lists the same entry point twice.
            others = found.setdefault(name, [])
            if not others or (value, point.distribution) not in [(one.value, one.distribution) for one in others]:
                others.append(point)


def _lines(path: str, *, among: str = "") -> list[str]:
    """Return the lines of a file, stripped, without comments; none if there is no such file, or no `among` in it."""
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.strip() for line in text.split("\n")] if among in text else []
    return [line for line in lines if line and not line.startswith(("#", ";"))]


def _load(points: list[_Point]) -> type[Backend]:
    """Return the class of the backend with these entry points. Raises SnapmgrError if it cannot be used."""
    if len(points) > 1:
        rivals = " and ".join(one.distribution for one in points)
        raise SnapmgrError(f"the backend {points[0].name} comes from both {rivals}", hint="uninstall one of them")
    return _checked(_import(points[0]), points[0])


def _import(point: _Point) -> object:
    try:
        module, _, attribute = point.value.partition(":")
        return reduce(getattr, attribute.strip().split("."), import_module(module.strip()))
    except SnapmgrError:
        raise
    except ImportError as error:
        # A package is missing, or a compiled module does not fit this system's libraries.
        raise MissingRequirementError(
            f"{point.title} cannot be imported: {error}", hint=f"reinstall {point.project} with all its requirements"
        ) from error
    except Exception as error:
        # A plugin's import may raise anything; the other backends must stay usable.
        raise SnapmgrError(
            f"{point.title} cannot be imported: {type(error).__name__}: {error}",
            hint=f"report this to the authors of {point.project}",
        ) from error


def _checked(backend: object, point: _Point) -> type[Backend]:
    """Return `backend` if it fulfils the contract. Raises SnapmgrError with everything that is missing."""
    version = getattr(backend, "api_version", None)
    missing = [attribute for attribute in _contract() if not hasattr(backend, attribute)]
    if point.name in _RESERVED:
        what = "has a name that is reserved in the configuration"
    elif not isinstance(backend, type):
        what = f"is not a class but {backend!r}"
    elif version is not None and version != API_VERSION:
        # Before what is missing, as another version may have other methods.
        newer = isinstance(version, int) and version > API_VERSION
        raise SnapmgrError(
            f"{point.title} is written for version {version} of the backend interface; this snapmgr has version "
            f"{API_VERSION}",
            hint="upgrade snapmgr" if newer else f"upgrade {point.project}",
        )
    elif missing:
        what = f"does not define {', '.join(missing)}"
    elif getattr(backend, "name", None) != point.name:
        what = f"calls itself {getattr(backend, 'name', None)!r}"
    else:
        return backend
    raise SnapmgrError(
        f"{point.title} {what}",
        hint=f"report this to the authors of {point.project}; docs/how-to/write-a-backend.md has the contract",
    )


def _contract() -> list[str]:
    """Return the names that `snapmgr.api.Backend` declares."""
    methods = [name for name, value in vars(Backend).items() if not name.startswith("_") and callable(value)]
    return sorted({*methods, *(name for name in Backend.__annotations__ if not name.startswith("_"))})


def _parse_config(name: str, kind: type[Any], table: Mapping[str, Any]) -> object:
    from snapmgr.config.values import describe_unknown, in_users_words, show  # noqa: PLC0415 - few tables are wrong

    where = f"backend.{name}"
    shape = msgspec.inspect.type_info(kind)
    if not isinstance(shape, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
        raise SnapmgrError(f"the backend {name} has a Config that is neither a dataclass nor a msgspec.Struct")
    allowed = [field.encode_name for field in shape.fields]
    # msgspec itself ignores keys that a dataclass does not have.
    problems = [f"{where}.{key}: {describe_unknown(key, allowed)}" for key in table if key not in allowed]
    parsed: object = None
    try:
        parsed = msgspec.convert({key: value for key, value in table.items() if key in allowed}, kind, strict=True)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.size`"
        said, _, at = str(error).partition(" - at `$")
        key = at.rstrip("`")
        # "Invalid enum value 'fat'" does not name the valid ones.
        choices = [
            field.type.values
            for field in shape.fields
            if f".{field.encode_name}" == key and isinstance(field.type, msgspec.inspect.LiteralType)
        ]
        said = f"allowed are {', '.join(map(show, choices[0]))}" if choices else in_users_words(said)
        problems.append(f"{where}{key}: {said}")
    if problems:
        raise ConfigError("\n".join(problems), hint=f"correct [backend.{name}] in the configuration")
    return parsed
