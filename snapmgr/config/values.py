"""Checks one TOML table against its Struct and collects all errors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from snapmgr.contract.units import parse_duration, parse_size, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PERCENT_MOST = 100.0


def read_table(
    table: Mapping[str, Any], kind: type[msgspec.Struct], where: str, errors: list[str], *, skip: frozenset[str]
) -> dict[str, Any]:
    """Given a TOML table and the Struct it should be, return the typed values of its valid keys, by attribute name.

    Nested tables become such dicts too. Errors are appended to `errors`, each with the path of the key (`where` is the
    table's path) and the allowed values. `skip` names attributes that are not keys.
    """
    hints = _hints(kind)
    fields = {key: name for key, name in attributes(kind).items() if name not in skip}
    values: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{where}.{key}"
        if key not in fields:
            errors.append(f"{path}: {describe_unknown(key, fields)}")
            continue
        hint = hints[fields[key]]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            if isinstance(value, dict):
                values[fields[key]] = read_table(value, hint, path, errors, skip=frozenset())
            else:
                errors.append(f"{path} = {show(value)}: must be a table")
            continue
        try:
            values[fields[key]] = _read_value(value, hint)
        except ValueError as error:
            errors.append(f"{path} = {show(value)}: {error}")
    return values


def attributes(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the names of a Struct's attributes by its keys: msgspec's own way evaluates the annotations, too."""
    return dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))


@cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def describe_unknown(key: str, allowed: Iterable[str]) -> str:
    """Return the error for an unknown key: it suggests the nearest allowed key, or lists all. The value may be
    a password, so it is not shown.
    """
    import difflib  # noqa: PLC0415 - for messages alone

    allowed = sorted(allowed)
    # "keep_daily" for "keep-daily" is the most likely mistake.
    swapped = [name for name in allowed if name.replace("-", "_") == key.replace("-", "_").lower()]
    near = swapped or difflib.get_close_matches(key, allowed, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; allowed are {', '.join(allowed)}"


def show(value: object) -> str:
    """Return a value roughly as the user wrote it, shortened for an error message."""
    import json  # noqa: PLC0415 - for messages alone

    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:99] + "…"  # noqa: PLR2004


def _read_value(value: Any, hint: Any) -> Any:  # noqa: ANN401 - any TOML value to any typed one
    """Return `value` in the type of the annotation `hint`. Raises ValueError with the allowed values."""
    alternatives = [part for part in get_args(hint) if part is not type(None)]
    if type(None) in get_args(hint):
        # Optional: TOML has no null, so only the other type can be written.
        hint = alternatives[0]
    if get_origin(hint) is Annotated:
        marker = hint.__metadata__[0]
        if isinstance(marker, str):
            return _read_marked(value, marker)
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if value not in allowed or isinstance(value, bool):
            raise ValueError(f"allowed are {', '.join(show(one) for one in allowed)}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError('must be a list, as in ["…", "…"]')
        return tuple(_read_value(one, get_args(hint)[0]) for one in value)
    try:
        return msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(in_users_words(str(error))) from None


def in_users_words(message: str) -> str:
    """Translate msgspec's "Expected `int`, got `str`" into TOML's terms."""
    for ours, theirs in (
        ("must be", "Expected"),
        ("a text", "`str`"),
        ("a whole number", "`int`"),
        ("true or false", "`bool`"),
        ("a list", "`array`"),
        ("a table", "`object`"),
        ("a fractional number", "`float`"),
    ):
        message = message.replace(theirs, ours)
    return message


def _read_marked(value: object, marker: str) -> float | int | str:
    if not isinstance(value, str):
        examples = {
            "duration": '"30s"',
            "size": '"256M"',
            "share": '"all" or "20%"',
            "room": '"5%" or "10G"',
            "path": '"/a/path"',
        }
        raise ValueError(f"must be a text such as {examples[marker]}")  # noqa: TRY004 - callers collect ValueErrors
    if marker == "duration":
        return parse_duration(value)
    if marker == "size":
        return parse_size(value)
    if marker == "share":
        return _read_share(value)
    if marker == "room":
        part_of(value, 0)
        return value
    if not is_absolute(value):
        raise ValueError("must be an absolute path without ..")
    return value


def is_absolute(path: str) -> bool:
    """Return whether a path is absolute and has no ".."; records on disk hold no others."""
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def _read_share(value: str) -> float:
    if value == "all":
        return 1.0
    number = value.removesuffix("%")
    if number != value and number.isascii() and number.replace(".", "", 1).isdigit():
        share = float(number)
        if 0 < share <= _PERCENT_MOST:
            return share / _PERCENT_MOST
    raise ValueError('allowed are "all" and a percentage such as "20%", more than 0 and at most 100')
