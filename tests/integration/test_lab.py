"""The lab's object store is an object store, and as slow as it is told to be."""

from __future__ import annotations

import http.client
import random
import re
import socket
import threading
import time
import urllib.parse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.juicefs import juicefs_volume
from support.objectstore import ACCESS_KEY, SECRET_KEY, ObjectStore, Pace, object_store
from support.processes import wait_until
from support.redobackup import redo_backup

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 60.0
AUTHORIZED = {"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"}


@pytest.fixture(scope="module")
def shared() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(shared: ObjectStore) -> Iterator[ObjectStore]:
    shared.bucket("b")
    yield shared
    shared.fail(0)
    shared.pace(Pace())


def ask(store: ObjectStore, method: str, key: str, body: bytes = b"", **headers: str):
    with closing(http.client.HTTPConnection("127.0.0.1", store.port, timeout=LIMIT_S)) as connection:
        fields = AUTHORIZED | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, key, body, fields)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def parsed(text: bytes) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - of our own server


def path(key: str) -> str:
    return "/b/" + urllib.parse.quote(key, safe="")


@pytest.mark.parametrize("key", ["a", "a/b", "a/", "a//b", ".hidden/..", "=x/%/=", "ä ö/'\"<&>?", "n" * 200, "a/b/c/d"])
def test_an_object_is_what_was_put_last_under_its_key(store, key):
    data = random.Random(key).randbytes(5000)
    assert ask(store, "PUT", path(key), b"older and longer" * 1000, x_amz_meta_sum="1")[0] == 200
    assert ask(store, "PUT", path(key), data, x_amz_meta_sum="42", Content_Type="text/x")[0] == 200
    status, got, headers = ask(store, "GET", path(key))
    assert (status, got) == (200, data)
    assert (headers["x-amz-meta-sum"], headers["Content-Type"]) == ("42", "text/x")
    status, nothing, of_head = ask(store, "HEAD", path(key))
    assert (status, nothing, of_head["Content-Length"], of_head["ETag"]) == (200, b"", "5000", headers["ETag"])
    for asked, part in (("0-0", data[:1]), ("100-199", data[100:200]), ("4990-9999", data[-10:]), ("-7", data[-7:])):
        status, got, of_range = ask(store, "GET", path(key), Range=f"bytes={asked}")
        assert (status, got) == (206, part)
        assert of_range["Content-Range"].endswith("/5000")
    assert ask(store, "GET", path(key), Range="bytes=5000-")[0] == 416
    assert ask(store, "DELETE", path(key))[0] == 204
    status, error, _ = ask(store, "GET", path(key))
    assert (status, parsed(error).findtext("Code")) == (404, "NoSuchKey")
    assert ask(store, "DELETE", path(key))[0] == 204


def test_who_has_another_key_or_another_bucket_gets_nothing(store):
    assert ask(store, "PUT", "/b/x", b"x", Authorization="AWS4 Credential=lab2/x")[0] == 403
    assert ask(store, "PUT", "/nowhere/x", b"x")[0] == 404
    assert ask(store, "PUT", "/../x", b"x")[0] == 404
    assert ask(store, "GET", "/b/x")[0] == 404


def listed(store: ObjectStore, version: int, limit: int, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
    keys: list[str] = []
    prefixes: list[str] = []
    after: str | None = None
    while True:
        query = {"max-keys": str(limit), "prefix": prefix, "delimiter": delimiter, "encoding-type": "url"}
        query |= {"list-type": "2"} if version == 2 else {}
        if after is not None:
            query |= {"continuation-token" if version == 2 else "marker": after}
        status, text, _ = ask(store, "GET", f"/l?{urllib.parse.urlencode(query)}")
        assert status == 200
        tree = parsed(text)
        keys += [urllib.parse.unquote(item.text or "") for item in tree.findall("Contents/Key")]
        prefixes += [urllib.parse.unquote(item.text or "") for item in tree.findall("CommonPrefixes/Prefix")]
        if tree.findtext("IsTruncated") == "false":
            return keys, prefixes
        after = tree.findtext("NextContinuationToken") or urllib.parse.unquote(tree.findtext("NextMarker") or "")


@settings(max_examples=25)
@given(
    keys=st.sets(st.text("ab-/.", min_size=1, max_size=6), min_size=1, max_size=12),
    prefix=st.text("ab/", max_size=2),
    delimiter=st.sampled_from(["", "/", "b"]),
    version=st.sampled_from([1, 2]),
    limit=st.integers(1, 5),
)
def test_a_list_is_sorted_and_complete_however_it_is_cut(shared, keys, prefix, delimiter, version, limit):
    shared.bucket("l")
    for key in listed(shared, 2, 1000, "", "")[0]:
        ask(shared, "DELETE", "/l/" + urllib.parse.quote(key, safe=""))
    for key in keys:
        assert ask(shared, "PUT", "/l/" + urllib.parse.quote(key, safe=""), b"x")[0] == 200
    matching = sorted(key for key in keys if key.startswith(prefix))
    cut = {key: key.find(delimiter, len(prefix)) if delimiter else -1 for key in matching}
    expected = [key for key in matching if cut[key] < 0]
    commons = sorted({key[: cut[key] + len(delimiter)] for key in matching if cut[key] >= 0})
    assert listed(shared, version, limit, prefix, delimiter) == (expected, commons)


def test_an_object_in_parts_is_put_together_in_their_order(store):
    _, text, _ = ask(store, "POST", "/b/big?uploads")
    upload = parsed(text).findtext("UploadId")
    parts = [random.Random(number).randbytes(300_000) for number in range(3)]
    for number, part in reversed(list(enumerate(parts, 1))):
        assert ask(store, "PUT", f"/b/big?uploadId={upload}&partNumber={number}", part)[0] == 200
    assert ask(store, "GET", "/b/big")[0] == 404
    order = "".join(f"<Part><PartNumber>{number}</PartNumber></Part>" for number in (1, 2, 3))
    assert ask(store, "POST", f"/b/big?uploadId={upload}", order.encode())[0] == 200
    assert ask(store, "GET", "/b/big")[1] == b"".join(parts)
    assert ask(store, "PUT", f"/b/big?uploadId={upload}&partNumber=4", b"x")[0] == 404
    assert ask(store, "PUT", "/b/copy", x_amz_copy_source="/b/big")[0] == 200
    assert ask(store, "GET", "/b/copy")[1] == b"".join(parts)


def drafts(store: ObjectStore) -> list[Path]:
    return list(store.root.rglob(".draft-*"))


def half_a_put(store: ObjectStore) -> socket.socket:
    """Send half of an object; return the connection when the store has begun to write it."""
    client = socket.create_connection(("127.0.0.1", store.port))
    head = f"PUT /b/half HTTP/1.1\r\nAuthorization: {AUTHORIZED['Authorization']}\r\nContent-Length: 200000\r\n\r\n"
    client.sendall(head.encode() + bytes(100_000))
    wait_until(lambda: any(path.stat().st_size > 0 for path in drafts(store)), LIMIT_S)
    return client


def test_what_ends_in_the_middle_leaves_the_older_object(tmp_path):
    with object_store(tmp_path / "s") as store:
        store.bucket("b")
        ask(store, "PUT", "/b/half", b"older")
        half_a_put(store).close()
        wait_until(lambda: not drafts(store), LIMIT_S)
        assert ask(store, "GET", "/b/half")[1] == b"older"
        with half_a_put(store):
            store.stop()
            assert drafts(store)
        store.start()
        assert ask(store, "GET", "/b/half")[1] == b"older"
        assert not drafts(store)
        statistics = store.statistics(count=True)
        assert (statistics.objects, statistics.object_bytes, statistics.get) == (1, 5, 1)


def test_one_connection_serves_request_after_request_and_waits_where_it_is_asked_to(store):
    with closing(http.client.HTTPConnection("127.0.0.1", store.port, timeout=LIMIT_S)) as connection:
        for number in range(50):
            connection.request("PUT", f"/b/k{number}", b"%d" % number, AUTHORIZED)
            assert connection.getresponse().read() == b""
            connection.request("GET", f"/b/k{number}", headers=AUTHORIZED)
            assert connection.getresponse().read() == b"%d" % number
    with socket.create_connection(("127.0.0.1", store.port), timeout=LIMIT_S) as client:
        line = f"HTTP/1.1\r\nAuthorization: {AUTHORIZED['Authorization']}\r\n"
        client.sendall(f"PUT /b/e {line}Expect: 100-continue\r\nContent-Length: 3\r\n\r\n".encode())
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(f"abcGET /b/e {line}Connection: close\r\n\r\n".encode())
        with client.makefile("rb") as answers:
            text = answers.read()
    assert re.findall(rb"HTTP/1.1 (\d+)", text) == [b"200", b"200"]
    assert text.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize(
    "head", ["GET /b/x HTTP/1.0", "nonsense", "GET b HTTP/1.1", "PUT /b/x HTTP/1.1\r\nTransfer-Encoding: chunked"]
)
def test_what_it_does_not_understand_is_refused(store, head):
    with socket.create_connection(("127.0.0.1", store.port), timeout=LIMIT_S) as client:
        client.sendall(f"{head}\r\n\r\n".encode())
        with client.makefile("rb") as answers:
            assert re.match(rb"HTTP/1.1 (400|501) ", answers.read())
    assert store.statistics().failed > 0


def in_parallel(store: ObjectStore, method: str, size: int, count: int) -> float:
    """Return the seconds that `count` requests of `size` bytes take that are made at once."""
    threads = [
        threading.Thread(target=ask, args=(store, method, f"/b/{n}", bytes(size) if method == "PUT" else b""))
        for n in range(count)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started


def test_it_is_not_quicker_than_its_pace(store):
    in_parallel(store, "PUT", 1 << 20, 4)
    store.pace(Pace(total_bytes_s=8 << 20))
    assert in_parallel(store, "GET", 1 << 20, 4) > 0.48
    assert in_parallel(store, "PUT", 1 << 20, 4) > 0.48
    store.pace(Pace(request_bytes_s=4 << 20))
    assert in_parallel(store, "GET", 1 << 20, 2) > 0.24
    store.pace(Pace(get_latency_s=0.3, put_latency_s=0.5))
    before = store.statistics()
    assert in_parallel(store, "GET", 0, 4) > 0.3
    assert in_parallel(store, "PUT", 10, 4) > 0.5
    since = store.statistics().since(before)
    assert (since["get"], since["put"], since["bytes_in"], since["failed"]) == (4, 4, 40, 0)
    assert store.statistics().active_max > 1
    store.pace(Pace())
    store.fail(503)
    assert ask(store, "GET", "/b/0")[0] == 503
    store.fail(0)
    assert ask(store, "GET", "/b/0")[0] == 200


@pytest.mark.needs("root", "juicefs")
def test_a_juicefs_volume_lives_in_it(store):
    with juicefs_volume(
        storage="s3", bucket=store.bucket("volume"), access_key=ACCESS_KEY, secret_key=SECRET_KEY
    ) as volume:
        data = {f"f{number}": random.Random(number).randbytes(number * 700_000) for number in range(1, 8)}
        for name, content in data.items():
            (volume.point / name).write_bytes(content)
        volume.unmount()
        filled = store.statistics(count=True)
        assert filled.object_bytes is not None
        assert filled.object_bytes >= sum(map(len, data.values()))
        with volume.mounted(cache=volume.folder / "another"):
            assert {name: (volume.point / name).read_bytes() for name in data} == data
            assert store.statistics().since(filled)["bytes_out"] >= sum(map(len, data.values()))
            volume.juicefs("fsck", volume.meta_url)
            for name in data:
                (volume.point / name).unlink()
        volume.juicefs("gc", "--delete", volume.meta_url)


@pytest.mark.needs("root", "mariadbd", "mariadb-backup")
def test_a_backup_made_under_load_has_the_wanted_redo_log(tmp_path):
    made = redo_backup(4 << 20, 4 << 20, cache=tmp_path)
    assert (made.folder / "ib_logfile0").stat().st_size == made.redo_bytes
    # What the load wrote before the backup began is in it for certain.
    assert 3 << 20 < made.redo_bytes < 16 << 20
    assert made.data_bytes > 4 << 20
    assert len(set(made.checksums.values())) == len(made.checksums) == 8
    modified = (made.folder / "ib_logfile0").stat().st_mtime_ns
    assert redo_backup(4 << 20, 4 << 20, cache=tmp_path) == made
    assert (made.folder / "ib_logfile0").stat().st_mtime_ns == modified
    assert [path.name for path in tmp_path.iterdir()] == [made.folder.parent.name]
