"""Cached digests of files."""

import hashlib
import os
import sqlite3
import time

import pytest

from graphquant.batch import cache_key
from graphquant.batch.cache_key import FileHashes
from graphquant.errors import UsageError


def wait_for_new_timestamp(folder):
    """Wait until the kernel's clock, whose grain is several milliseconds, gives a file another time."""
    clock = folder / "clock"
    clock.write_bytes(b"")
    start = clock.stat().st_ctime_ns
    while clock.stat().st_ctime_ns == start:
        clock.write_bytes(b"")


def test_unchanged_file_is_hashed_once(tmp_path, monkeypatch):
    """An unchanged file is not read again. A new modification time, size or inode causes a new read."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    old = time.time_ns() - 10 * cache_key.TIMESTAMP_GRAIN
    monkeypatch.setattr(cache_key, "TIMESTAMP_GRAIN", 0)  # recently written files are cached too
    os.utime(path, ns=(old, old))
    reads = []
    file_digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: reads.append(1) or file_digest(*arguments))
    with FileHashes(tmp_path / "m.sqlite") as file_hashes:
        wait_for_new_timestamp(tmp_path)
        assert file_hashes.digest(path) == hashlib.sha256(b"one").hexdigest()
    with FileHashes(tmp_path / "m.sqlite") as file_hashes:
        assert file_hashes.digest(path) == hashlib.sha256(b"one").hexdigest()
        assert len(reads) == 1
        wait_for_new_timestamp(tmp_path)
        path.write_bytes(b"two")
        os.utime(path, ns=(old + 1, old + 1))
        assert file_hashes.digest(path) == hashlib.sha256(b"two").hexdigest()
        other = tmp_path / "b"
        other.write_bytes(b"six")
        os.utime(other, ns=(old + 1, old + 1))
        other.replace(path)
        assert file_hashes.digest(path) == hashlib.sha256(b"six").hexdigest()
    assert len(reads) == 3


def test_reset_modification_time(tmp_path, monkeypatch):
    """A file that is rewritten in place with its old size and modification time is hashed again."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    old = time.time_ns() - 10 * cache_key.TIMESTAMP_GRAIN
    os.utime(path, ns=(old, old))
    monkeypatch.setattr(cache_key, "TIMESTAMP_GRAIN", 0)
    with FileHashes(tmp_path / "m.sqlite") as file_hashes:
        wait_for_new_timestamp(tmp_path)
        assert file_hashes.digest(path) == hashlib.sha256(b"one").hexdigest()
        inode = path.stat().st_ino
        path.write_bytes(b"two")
        os.utime(path, ns=(old, old))
        assert path.stat().st_ino == inode
        assert file_hashes.digest(path) == hashlib.sha256(b"two").hexdigest()


def test_recently_changed_file_is_hashed_again(tmp_path):
    """A file changed moments ago is hashed again, because a further change may have the same time."""
    path = tmp_path / "a"
    with FileHashes(tmp_path / "m.sqlite") as file_hashes:
        path.write_bytes(b"one")
        now = path.stat().st_mtime_ns
        file_hashes.digest(path)
        path.write_bytes(b"two")
        os.utime(path, ns=(now, now))
        assert file_hashes.digest(path) == hashlib.sha256(b"two").hexdigest()


def test_claimed_outputs(tmp_path, monkeypatch):
    """A claimed output is known by any spelling of its path. It is forgotten if released or missing."""
    monkeypatch.chdir(tmp_path)
    with FileHashes(tmp_path / "m.sqlite") as file_hashes:
        assert file_hashes.output_digest("out.onnx") is None
        file_hashes.claim_output("out.onnx")
        file_hashes.claim_output(tmp_path / "other.onnx", "ab")
        file_hashes.claim_output("s3://bucket/out.onnx", "cd")
        assert file_hashes.output_digest(tmp_path / "out.onnx") == ""
        assert file_hashes.output_digest("other.onnx") == "ab"
        file_hashes.claim_output("out.onnx", None)
        assert file_hashes.output_digest("out.onnx") is None
        file_hashes.remove_missing()
        assert file_hashes.output_digest("other.onnx") is None
        assert file_hashes.output_digest("s3://bucket/out.onnx") == "cd"


def test_invalid_database(tmp_path, monkeypatch):
    """A cache file that is no database raises UsageError with the way to repair it, and is closed."""
    (tmp_path / "m.sqlite").write_bytes(b"no database" * 100)
    connection = sqlite3.connect(tmp_path / "m.sqlite")
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: connection)
    with pytest.raises(UsageError, match=r"m\.sqlite, .* --cache-dir"):
        FileHashes(tmp_path / "m.sqlite")
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("select 1")
