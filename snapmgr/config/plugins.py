"""Finds, checks and constructs storage backends; all are registered in the entry-point group ``snapmgr.backends``."""

from __future__ import annotations

import os
import sys
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

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
    return tuple(_load_plugin(points) for _, points in sorted(_points().items()))


def load_backend(name: str) -> type[Backend]:
    """Return the class of one backend; no other one is imported.

    Raises ConfigError if none has this name, MissingRequirementError if a module that it needs is not installed, and
    SnapmgrError if it is broken or written for another version of the interface.
    """
    points = _points()
    if name not in points:
        known = ", ".join(sorted(points)) or "none: reinstall snapmgr, as its own backends are missing"
        raise ConfigError(f"there is no backend {name!r}", hint=f"installed backends: {known}")
    plugin = _load_plugin(points[name])
    if plugin.error is not None:
        raise plugin.error
    return cast("type[Backend]", plugin.backend)


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
    distribution: str
    """`Plugin.distribution`."""


def _points() -> dict[str, list[_Point]]:
    found: dict[str, list[_Point]] = {}
    seen: set[str] = set()
    for folder in dict.fromkeys(sys.path):
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
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
    for line in _lines(os.path.join(info, "entry_points.txt")):
        if line.startswith("["):
            section = line.strip("[]")
        elif section == GROUP and "=" in line:
            name, value = (part.strip() for part in line.split("=", 1))
            point = _Point(name=name, value=value, distribution=_distribution(info))
            # An editable install beside a wheel lists the same entry point twice.
            others = found.setdefault(name, [])
            if point not in others:
                others.append(point)


def _lines(path: str) -> list[str]:
    """Return the lines of a file, stripped, without comments; none if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except OSError:
        return []
    return [line for line in lines if line and not line.startswith(("#", ";"))]


def _distribution(info: str) -> str:
    fields: dict[str, str] = {}
    for line in _lines(os.path.join(info, "METADATA")) or _lines(os.path.join(info, "PKG-INFO")):
        key, _, value = line.partition(":")
        fields.setdefault(key, value.strip())
    return f"{fields['Name']} {fields.get('Version', '?')}" if "Name" in fields else "an unknown distribution"


def _project(distribution: str) -> str:
    """Given "snapmgr 1.0", return "snapmgr"."""
    return distribution.partition(" ")[0]


def _load_plugin(points: list[_Point]) -> Plugin:
    point = points[0]
    distribution = point.distribution
    backend: type[Backend] | None = None
    error: SnapmgrError | None = None
    if len(points) > 1:
        rivals = " and ".join(one.distribution for one in points)
        error = SnapmgrError(f"the backend {point.name} comes from both {rivals}", hint="uninstall one of them")
    else:
        try:
            backend = _checked(_import(point, distribution), point.name, distribution)
        except SnapmgrError as raised:
            error = raised
    return Plugin(name=point.name, distribution=distribution, backend=backend, error=error)


def _import(point: _Point, distribution: str) -> object:
    of = f"the backend {point.name} (of {distribution})"
    try:
        module, _, attribute = point.value.partition(":")
        return reduce(getattr, attribute.strip().split("."), import_module(module.strip()))
    except SnapmgrError:
        raise
    except ImportError as error:
        # A package is missing, or a compiled module does not fit this system's libraries.
        raise MissingRequirementError(
            f"{of} cannot be imported: {error}", hint=f"reinstall {_project(distribution)} with all its requirements"
        ) from error
    except Exception as error:
        # A plugin's import may raise anything; the other backends must stay usable.
        raise SnapmgrError(
            f"{of} cannot be imported: {type(error).__name__}: {error}",
            hint=f"report this to the authors of {_project(distribution)}",
        ) from error


def _checked(backend: object, name: str, distribution: str) -> type[Backend]:
    """Return `backend` if it fulfils the contract. Raises SnapmgrError with everything that is missing."""
    of = f"the backend {name} (of {distribution})"
    report = f"report this to the authors of {_project(distribution)}; docs/how-to/write-a-backend.md has the contract"
    if name in _RESERVED:
        raise SnapmgrError(f"{of} has a name that is reserved in the configuration", hint=report)
    if not isinstance(backend, type):
        raise SnapmgrError(f"{of} is not a class but {backend!r}", hint=report)
    version = getattr(backend, "api_version", None)
    # Checked first, as another version may have other methods.
    if version is not None and version != API_VERSION:
        newer = isinstance(version, int) and version > API_VERSION
        raise SnapmgrError(
            f"{of} is written for version {version} of the backend interface; this snapmgr has version {API_VERSION}",
            hint="upgrade snapmgr" if newer else f"upgrade {_project(distribution)}",
        )
    missing = [attribute for attribute in _contract() if not hasattr(backend, attribute)]
    if missing:
        raise SnapmgrError(f"{of} does not define {', '.join(missing)}", hint=report)
    if getattr(backend, "name", None) != name:
        raise SnapmgrError(f"{of} calls itself {getattr(backend, 'name', None)!r}", hint=report)
    return backend


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
