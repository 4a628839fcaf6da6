"""A slow object store: an S3 server on the loopback whose latency and bandwidth are set (tests/lab/objectstore)."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import tempfile
import urllib.parse
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.kinds import cache_folder
from support.storage import shielded, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCES = Path(__file__).parent.parent / "lab" / "objectstore"
_COMPILE = ("gcc", "-O2", "-std=gnu17", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-format-truncation")
_LIMIT_S = 60.0

ACCESS_KEY = "LABACCESSKEY"
SECRET_KEY = "lab-secret"  # signatures are not checked


@cache
def objectstore_program() -> Path:
    """Compile the server, unless the cache folder has it already, and return its path."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"\0".join([repr(_COMPILE).encode(), *(path.read_bytes() for path in sources)])).hexdigest()
    program = cache_folder().parent / "lab" / f"objectstore-{digest[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            made = Path(folder) / "objectstore"
            files = [str(path) for path in sources if path.suffix == ".c"]
            subprocess.run([*_COMPILE, "-o", str(made), *files], check=True, stdin=subprocess.DEVNULL)
            # Two runs may compile at once: each makes the same.
            made.rename(program)
    return program


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How slow the store is. 0: no limit."""

    get_latency_s: float = 0.0
    """GET, HEAD and lists: until the first byte of the answer."""
    put_latency_s: float = 0.0
    """PUT, POST and DELETE: from the last byte of the body to the answer."""
    request_bytes_s: int = 0
    """One request's bandwidth."""
    total_bytes_s: int = 0
    """That of all requests together, in each direction."""


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """What the store has done since it was started."""

    get: int
    put: int
    head: int
    delete: int
    list: int
    other: int
    failed: int
    bytes_in: int
    bytes_out: int
    active_max: int
    """Most requests at once."""
    cpu_s: float
    objects: int | None = None
    object_bytes: int | None = None

    def since(self, before: StoreStatistics) -> dict[str, float]:
        """Return by how much each count is greater than `before`, those that only grow."""
        mine, old = asdict(self), asdict(before)
        return {name: mine[name] - old[name] for name in mine if name not in {"objects", "object_bytes", "active_max"}}


class ObjectStore:
    """A store, running or stopped. Made by `object_store`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Its address, without a bucket; the same after `stop` and `start`."""
        return f"http://127.0.0.1:{self.port}"

    def bucket(self, name: str = "lab") -> str:
        """Make a bucket, if it is not there, and return its URL, as ``juicefs format --bucket`` wants it."""
        self._request("PUT", f"/{name}")
        return f"{self.url}/{name}"

    def start(self) -> None:
        """Start it, at the port that it had; return when it listens."""
        with shielded():
            self._process = subprocess.Popen(
                [objectstore_program(), self.root, str(self.port), str(os.getpid()), ACCESS_KEY],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            line = stdout.readline()
        if not line:
            raise RuntimeError(f"the object store ended with {self._process.wait()}: see its message above")
        self.port = int(line)

    def stop(self) -> None:
        """Kill it, as a crash would; what was stored stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pace(self, pace: Pace) -> None:
        """Be as slow as `pace` from the next request on."""
        values = {
            "get_latency_ns": round(pace.get_latency_s * 1e9),
            "put_latency_ns": round(pace.put_latency_s * 1e9),
            "request_bytes_s": pace.request_bytes_s,
            "total_bytes_s": pace.total_bytes_s,
        }
        self._lab(values)

    def fail(self, status: int = 503) -> None:
        """Answer every request with this HTTP status; 0: work again."""
        self._lab({"fail_status": status})

    def statistics(self, *, count: bool = False) -> StoreStatistics:
        """Return what it has done; with `count` also how many objects of how many bytes there are now."""
        return StoreStatistics(**self._lab({"count": ""} if count else {}))

    def _lab(self, query: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._request("GET", f"/.lab?{urllib.parse.urlencode(query)}"))
        return answer

    def _request(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/lab"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LIMIT_S)) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status not in {200, 204}:
            raise RuntimeError(f"the object store answered {method} {path} with {answer.status}: {content!r}")
        return content


@contextmanager
def object_store(root: Path | None = None, *, pace: Pace | None = None) -> Iterator[ObjectStore]:
    """Run a store while the context lasts; it dies with us, even by SIGKILL.

    Args:
        root: the folder of its objects, which stays; by default one of its own, which goes. Its file system must have
            extended attributes.
        pace: how slow it is; by default as quick as it can be.
    """
    with ExitStack() as stack:
        store = ObjectStore(root if root is not None else stack.enter_context(work_folder()) / "objects")
        stack.callback(store.stop)
        store.start()
        if pace is not None:
            store.pace(pace)
        yield store
