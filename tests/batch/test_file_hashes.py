"""Digests of files, remembered as long as the files look the same."""

import hashlib
import os
import time

import pytest

from graphquant.batch import cache_key as module
from graphquant.batch.cache_key import FileHashes
from graphquant.errors import UsageError


def test_a_file_is_hashed_once(tmp_path, monkeypatch):
    """A file that looks the same is not read again; another time, size or file is."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    old = time.time_ns() - 10 * module.TIMESTAMP_GRAIN
    monkeypatch.setattr(module, "TIMESTAMP_GRAIN", 0)  # that it was written just now shows as well
    os.utime(path, ns=(old, old))
    reads = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: reads.append(1) or digest(*given))
    with FileHashes(tmp_path / "m.sqlite") as memo:
        time.sleep(0.02)  # longer than the grain of the kernel's clock
        assert memo.digest(path) == hashlib.sha256(b"one").hexdigest()
    with FileHashes(tmp_path / "m.sqlite") as memo:
        assert memo.digest(path) == hashlib.sha256(b"one").hexdigest()
        assert len(reads) == 1
        time.sleep(0.02)
        path.write_bytes(b"two")
        os.utime(path, ns=(old + 1, old + 1))
        assert memo.digest(path) == hashlib.sha256(b"two").hexdigest()
        other = tmp_path / "b"
        other.write_bytes(b"six")
        os.utime(other, ns=(old + 1, old + 1))
        other.replace(path)
        assert memo.digest(path) == hashlib.sha256(b"six").hexdigest()
    assert len(reads) == 3


def test_a_reset_modification_time(tmp_path, monkeypatch):
    """Other bytes of the same size, written in place, are read though the file has its old time again."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    old = time.time_ns() - 10 * module.TIMESTAMP_GRAIN
    os.utime(path, ns=(old, old))
    monkeypatch.setattr(module, "TIMESTAMP_GRAIN", 0)
    with FileHashes(tmp_path / "m.sqlite") as memo:
        time.sleep(0.02)  # longer than the grain of the kernel's clock
        assert memo.digest(path) == hashlib.sha256(b"one").hexdigest()
        inode = path.stat().st_ino
        path.write_bytes(b"two")
        os.utime(path, ns=(old, old))
        assert path.stat().st_ino == inode
        assert memo.digest(path) == hashlib.sha256(b"two").hexdigest()


def test_a_recently_changed_file_is_hashed_again(tmp_path):
    """Its time is now, and the next change may have the same."""
    path = tmp_path / "a"
    with FileHashes(tmp_path / "m.sqlite") as memo:
        path.write_bytes(b"one")
        now = path.stat().st_mtime_ns
        memo.digest(path)
        path.write_bytes(b"two")
        os.utime(path, ns=(now, now))
        assert memo.digest(path) == hashlib.sha256(b"two").hexdigest()


def test_claimed_outputs(tmp_path, monkeypatch):
    """Known by its place however it is named; forgotten when it is said, or when it is gone."""
    monkeypatch.chdir(tmp_path)
    with FileHashes(tmp_path / "m.sqlite") as memo:
        assert memo.output_digest("out.onnx") is None
        memo.claim_output("out.onnx")
        memo.claim_output(tmp_path / "other.onnx", "ab")
        memo.claim_output("s3://bucket/out.onnx", "cd")
        assert memo.output_digest(tmp_path / "out.onnx") == ""
        assert memo.output_digest("other.onnx") == "ab"
        memo.claim_output("out.onnx", None)
        assert memo.output_digest("out.onnx") is None
        memo.remove_missing()
        assert memo.output_digest("other.onnx") is None
        assert memo.output_digest("s3://bucket/out.onnx") == "cd"


def test_a_file_that_is_not_a_database(tmp_path):
    """It is told what to do."""
    (tmp_path / "m.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(UsageError, match=r"cannot be used: .*Remove it, or give another folder with --cache-dir"):
        FileHashes(tmp_path / "m.sqlite")
