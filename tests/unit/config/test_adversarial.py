"""Whatever stands in a configuration file, and whatever the file is: a Config or a ConfigError, at once."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapmgr.config.load import load_config, validate
from snapmgr.config.model import Config, Job, Retention, Verify
from snapmgr.config.plugins import list_plugins, make_backend
from snapmgr.contract.errors import ConfigError

FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
VALID = (
    '[defaults.retention]\nkeep-daily = 7\n[job.db]\nsource = "mysql"\nsocket = "/s"\nmax_stall = "1s"\n'
    'verify.tables = "20%"\n[job.f]\nsource = "directory"\npath = "/d"\n[backend.reflink]\nstore = "/x"\n'
)


def load(path: Path) -> Config | None:
    """Load as the program does; `validate` must agree."""
    problems = validate(path)
    if not problems:
        return load_config(path)
    with pytest.raises(ConfigError):
        load_config(path)
    return None


@FILE
@given(content=st.binary(max_size=300))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    load(path)


@FILE
@given(data=st.data())
def test_a_valid_file_with_bytes_exchanged(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(VALID.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    load(path)


def _keys(kind: type[Any]) -> list[str]:
    return list(kind.__struct_encode_fields__)


# Characters that TOML holds by \\u escapes only are drawn too: `_toml` escapes all.
TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            *("", "1s", "-1s", "nan", "inf", "1e999s", "9" * 400 + "s", "99999999999y", "20%", "0%", "1e9%", "all"),
            *("1E", "\0", "/\0", "/", "//", "/x/../..", "mysql", "directory", "auto", "256M", "٣s", "1_0s", "\x1b[2J"),
        )
    ),
)
SCALARS = st.one_of(
    TEXT,
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63) - 1, 10**400]),
    st.floats(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


def _table(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.one_of(st.sampled_from(_keys(kind)), st.sampled_from(["name", "password", ""]))
    return st.dictionaries(keys, VALUES, max_size=5)


JOB = st.tuples(_table(Job), _table(Verify) | VALUES, _table(Retention) | VALUES).map(
    lambda parts: parts[0] | {"verify": parts[1], "retention": parts[2]}
)
NAMES = st.one_of(
    st.sampled_from(["db", "a" * 48, "a" * 49, "latest", "all", "../x", "-n", "a\n", "", "\x1b[2J"]), TEXT
)
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={
        "state_dir": VALUES,
        "scratch_dir": VALUES,
        "defaults": JOB | VALUES,
        "job": st.dictionaries(NAMES, JOB | VALUES, max_size=3) | VALUES,
        "backend": st.dictionaries(NAMES, st.dictionaries(st.text(max_size=6), VALUES) | VALUES, max_size=2) | VALUES,
        "else": VALUES,
    },
)


def _toml(value: Any) -> str:
    """Return a value as TOML, inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(letter):08x}" for letter in value) + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


@FILE
@given(document=DOCUMENT)
def test_any_structure_with_our_keys(tmp_path: Path, document: dict[str, Any]) -> None:
    path = tmp_path / "c.toml"
    path.write_text("".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in document.items()))
    config = load(path)
    if config is None:
        return
    for name in config.jobs:
        assert name.isascii()
        assert "/" not in name
    for plugin in list_plugins():
        with suppress(ConfigError):
            make_backend(plugin.name, config.backends.get(plugin.name, {}), None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"[backend]\nreflink." + b"a." * 3_000 + b"a = 1", "nested too deeply"),
        (b"[job" + b".a" * 3_000 + b"]\n", "nested too deeply"),
        (b"a = " + b"9" * 5000, "a number that is too long"),
        (b"#" * (10 << 20), "too large for a configuration"),
        (b"state_dir = '/\0'", "is not TOML"),
        (b'state_dir = "/\\u0000"', "must be an absolute path"),
        (b'state_dir = "\\ud800"', "is not TOML"),
        (b"\xff", "is not UTF-8"),
        (b"\xef\xbb\xbf[job.a]", "is not TOML"),
        (b"[job.a]\r\nsource = 1979-13-40\r\n", "is not TOML"),
        (b'[job.a]\nsource = "directory"\npath = "/"\nretention.keep-last = -1', "retention.keep-last"),
        (b'[job.a]\nsource = "directory"\npath = "/"\nretention.keep-within = "1e400s"', "retention.keep-within"),
        (b'[job.a]\nsource = "directory"\npath = "/"\nsettle_timeout = nan', "settle_timeout"),
    ],
)
def test_a_nasty_file_is_refused_in_words_and_at_once(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert caught.value.message.startswith(str(path))
    assert time.monotonic() - start < 5


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), Path("/proc/self/fd/0/x"), tmp_path / "link"):
        if path.name == "link":
            path.symlink_to("link")
        with pytest.raises(ConfigError, match="is not a regular file|cannot be read|does not exist"):
            load_config(path)


def test_conf_d_is_read_with_the_same_care(tmp_path: Path) -> None:
    main, folder = tmp_path / "c.toml", tmp_path / "conf.d"
    main.write_text("")
    folder.mkdir()
    os.mkfifo(folder / "a.toml")
    with pytest.raises(ConfigError, match=r"a\.toml: is not a regular file"):
        load_config(main)


@pytest.mark.parametrize("name", ["c.toml", "conf.d", "conf.d/a.toml"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_to_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "conf.d" / "a.toml").write_text("")
    assert load_config(tmp_path / "c.toml").jobs == {}
    culprit = tmp_path / name
    culprit.chmod(culprit.stat().st_mode | mode)
    with pytest.raises(ConfigError, match="others could make snapmgr run their commands") as caught:
        load_config(tmp_path / "c.toml")
    assert caught.value.exit_code == 2
    assert f"chmod go-w {culprit}" in caught.value.message


@pytest.mark.needs("root")
@pytest.mark.parametrize("name", ["c.toml", "conf.d", "conf.d/a.toml"])
def test_what_another_user_owns_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "conf.d" / "a.toml").write_text("")
    os.chown(tmp_path / name, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        load_config(tmp_path / "c.toml")
