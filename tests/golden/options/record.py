"""Records what the real programs make of option files: ``PYTHONPATH=tests .venv/bin/python …/record.py``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from support.kinds import KINDS
from support.optionfiles import printed, texts

_CHOSEN = (
    rb'password="dq\"in"',
    rb"password=a\tb\\c\sd\n\r\b\qe",
    b"password=plain#hash",
    b"password='a#b' # note",
    b'password="it\'s"',
    b"password=it's # not",
    b"password='a' b",
    b"password=''",
    b"password='",
    b'password="',
    b'password="x\\"',
    b"password=x\\",
    b"password=\xc3\xa0",
    b'password="\xc3\xa0"',
    b"password=a\r",
    b"password",
    b"password=",
    b"pass-word = a = b",
    b"# a\n; b\n\n\tuser=x",
    b"user=x\nuser=y\nuser",
    b'user="a" "b"',
    b"us#er=x",
    b"!unknown /x\nuser=x",
    b"[mysqld]\nuser=y\n[Client]\nuser=z",
    b"password=" + b"x" * (4093 - 9) + b"\nuser=y",
)
_WHOLE = (
    b"user=x\n",
    b"\xef\xbb\xbf[client]\nuser=x\n",
    b"[client\nuser=x\n",
    b"",
    b"[client]",
    b"#x\n[client]\nuser=x",
)
_RANDOM = 250


def record() -> None:
    """Write options.json."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for text in (*_WHOLE, *(b"[client]\n" + lines + b"\n" for lines in _CHOSEN), *texts(1, _RANDOM)):
            said = {kind: printed(kind, text, Path(folder)) for kind in KINDS}
            (one,) = set(said.values())
            found.append({"text": text.decode("latin-1"), "printed": None if one is None else one.decode("latin-1")})
    lines = ",\n".join(json.dumps(one) for one in found)
    (Path(__file__).parent / "options.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    record()
