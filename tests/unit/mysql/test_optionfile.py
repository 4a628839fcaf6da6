"""Option files: the same findings as the makers' own programs, and nothing of a password in an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapmgr.contract.errors import ConfigError
from snapmgr.mysql.connect.client import Credentials, login_options
from snapmgr.mysql.connect.optionfile import options_in, parse_options, quoted, read_client_options

_RECORDED = json.loads((Path(__file__).parents[2] / "golden/options/options.json").read_text())


def as_printed(text: bytes) -> bytes | None:
    """What `my_print_defaults FILE client` would print; None if it would refuse the file."""
    try:
        found = [(name, value) for group, name, value in parse_options(text) if group.lower() == "client"]
    except ValueError:
        return None
    lines = (f"--{name}\n" if value is None else f"--{name}={value}\n" for name, value in found)
    return "".join(lines).encode("utf-8", "surrogateescape")


def test_every_recorded_file_is_read_as_both_makers_programs_read_it():
    wrong = [
        one["text"]
        for one in _RECORDED
        if as_printed(one["text"].encode("latin-1"))
        != (None if one["printed"] is None else one["printed"].encode("latin-1"))
    ]
    assert len(_RECORDED) > 200
    assert wrong == []


@given(st.binary(), st.binary())
@example(b"", b"[broken")
def test_any_bytes_are_options_or_are_refused_without_being_quoted(before, after):
    told = ""
    try:
        options_in(before + b"\npassword=hunter2\n" + after, "client")
    except ValueError as error:
        told = str(error)
    assert "hunter2" not in told


_written = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=60)


@given(_written)
@example('a\\"b\n#\r\\n\xa0')
def test_a_quoted_value_is_read_back_unchanged(value):
    text = b"[client]\npassword = " + quoted(value.encode()) + b"\n"
    assert options_in(text, "client") == {"password": value}


@given(_written)
@example("a\nuser = root")
def test_a_tool_gets_the_password_that_we_would_use(tmp_path_factory, password):
    path = tmp_path_factory.mktemp("login") / "c"
    path.write_bytes(b"[client]\nuser=x\nsocket=/s\npassword=" + quoted(password.encode()))
    path.chmod(0o600)
    told = options_in(login_options(Credentials(defaults_file=str(path))), "client")
    assert told == {"socket": "/s", "user": "x"} | ({"password": password} if password else {})


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ("user=a\nuser=b", {"user": "b"}),
        ("user=a\nuser", {}),
        ("user=a\nuser=", {"user": ""}),
        ("loose-my-name=a\n[mysqld]\nuser=x\n[CLIENT]\nmy_name=b", {"my_name": "b"}),
    ],
)
def test_the_last_of_equal_names_wins(lines, options):
    assert options_in(b"[client]\n" + lines.encode(), "client") == options


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("password=hunter2", "line 1 is an option before any"),
        ("[client]\npassword=hunter2\n[mysqld\n", 'line 3 has a "." without'),
        ("[client]\npassword=hunter2\n=x\n", "without a name"),
        ("[client]\npassword=hunter2\n ! include /x\n", "line 3 includes another file"),
        ("[client]\npassword=hunter2\n!includedir /x", "line 3 includes another file"),
        ("[client]\npassword=hunter2\0\n", "line 2 is longer than 4093 bytes or has a NUL"),
        ("[client]\npassword=hunter2\n" + "x" * 4094, "line 3 is longer"),
    ],
)
def test_a_file_that_the_programs_refuse_or_read_differently_is_refused(tmp_path, text, told):
    path = tmp_path / "c"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=told) as caught:
        read_client_options(str(path))
    error = caught.value
    assert str(path) in error.message
    assert "hunter2" not in f"{error.args}{error.hint}{error.__cause__}{error.__context__}"
    # The first frame is this test, which knows the password.
    frame = error.__traceback__.tb_next
    while frame is not None:
        assert "hunter2" not in repr(frame.tb_frame.f_locals)
        frame = frame.tb_next
