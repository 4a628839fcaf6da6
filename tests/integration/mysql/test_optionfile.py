"""Option files beside the makers' own programs: random ones, and those that we write."""

from __future__ import annotations

import random

from snapmgr.mysql.connect.optionfile import parse_options, quoted
from support.kinds import KINDS, kinds
from support.optionfiles import printed, texts


@kinds(*KINDS)
def test_random_files_are_read_as_the_servers_own_program_reads_them(kind, tmp_path):
    refused = 0
    for text in texts(2, 150):
        said = printed(kind, text, tmp_path)
        try:
            found = [(name, value) for group, name, value in parse_options(text) if group.lower() == "client"]
        except ValueError:
            refused += 1
            assert said is None, text
            continue
        lines = (f"--{name}\n" if value is None else f"--{name}={value}\n" for name, value in found)
        assert said == "".join(lines).encode("utf-8", "surrogateescape"), text
    assert 5 < refused < 100


@kinds(*KINDS)
def test_a_written_value_reaches_the_program_unchanged(kind, tmp_path):
    choose = random.Random(3)
    values = [bytes(choose.choices(b"ab\\\"'#; \t\r\n=\xa0[]!", k=choose.randint(0, 12))) for _ in range(80)]
    text = b"[client]\n" + b"".join(b"password = " + quoted(value) + b"\n" for value in values)
    assert printed(kind, text, tmp_path) == b"".join(b"--password=" + value + b"\n" for value in values)
