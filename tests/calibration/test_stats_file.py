"""Statistics files: exact round trip, small size, and safe reading of hostile files."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from graphquant.calibration.stats import DataRun, Stats, load_stats
from graphquant.calibration.targets import ObservationTarget
from graphquant.errors import DataError, UsageError
from graphquant.ir import TensorRef
from graphquant.observers import SketchAccumulator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def sketched(values: np.ndarray, axis: int | None, bits: int):
    """Return a sketch of two blocks of the values."""
    made = SketchAccumulator(axis, bits)
    for _ in range(2):
        made.add(values)
        made.close_block()
    return made.to_sketch()


@pytest.fixture
def stats_of_every_target() -> Stats:
    """Return statistics with every kind of target."""
    values = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    kinds = {"coarse": (None, 7), "fine": (None, 10), "bare": (None, 0), "channels": (0, 7), "empty": (None, 7)}
    kinds |= {"blank": (None, 10), "blank_channels": (0, 7), "single": (0, 7)}
    odd = np.array([[np.nan, np.inf, -1e300, 5e-324]])
    shown = {"odd": odd, "blank": values[:0], "single": values[:1]}
    targets = {
        TensorRef("body", name, port): ObservationTarget("c0de", *kind)
        for port, (name, kind) in enumerate(kinds.items())
    }
    targets |= {
        TensorRef("", "odd"): ObservationTarget("0dd", None, 7),
        TensorRef("", "hidden"): ObservationTarget("bad", None, 7),
    }
    return Stats(
        model_digest="abcdef",
        targets=targets,
        sketches={
            tensor: sketched(shown.get(tensor.op.partition("_")[0], values), target.axis, target.bits)
            for tensor, target in targets.items()
            if tensor.op not in {"empty", "hidden"}
        },
        runs=(
            DataRun(data_digest="d0", samples=22, block_size=4, block_ranges=((0, 2), (3, 6))),
            DataRun(data_digest="d1", samples=1, block_size=1, block_ranges=()),
        ),
        unobservable={TensorRef("", "hidden"): "nobody can see it"},
    )


@pytest.fixture
def stats_path(stats_of_every_target: Stats, tmp_path: Path) -> Path:
    """Return the path of a statistics file."""
    stats_of_every_target.save(tmp_path / "stats.gqs")
    return tmp_path / "stats.gqs"


def test_round_trip(stats_of_every_target: Stats, stats_path: Path, tmp_path: Path) -> None:
    """Statistics are read exactly as written, and written again as the same bytes."""
    found = load_stats(stats_path)
    assert found == stats_of_every_target
    assert list(found.targets) == list(stats_of_every_target.targets)
    with zipfile.ZipFile(stats_path) as archive:
        header = json.loads(archive.read("header.json"))
    assert (header["format"], header["version"]) == ("graphquant statistics", 3)
    unreached = replace(found, sketches={})
    unreached.save(tmp_path / "again.gqs")
    assert load_stats(tmp_path / "again.gqs") == unreached
    found.save(tmp_path / "again.gqs")
    assert (tmp_path / "again.gqs").read_bytes() == stats_path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.gqs", "stats.gqs"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=2, max_side=6)), st.sampled_from([0, 7, 10]))
def test_round_trip_of_any_values(tmp_path: Path, values: np.ndarray, bits: int) -> None:
    """NaN, infinities and denormals survive the round trip."""
    tensor = TensorRef("", "x")
    made = Stats(
        model_digest="a",
        targets={tensor: ObservationTarget("b", None, bits)},
        sketches={tensor: sketched(values, None, bits)},
    )
    made.save(tmp_path / "any.gqs")
    assert load_stats(tmp_path / "any.gqs") == made


def test_file_size(stats_path: Path) -> None:
    """An int8 histogram of a normal tensor takes a few KB."""
    assert stats_path.stat().st_size < 6000


def test_other_files(tmp_path: Path) -> None:
    """A missing file, a folder, text, an empty file and another zip are rejected."""
    with pytest.raises(DataError, match=r"none.gqs.*`graphquant calibrate"):
        load_stats(tmp_path / "none.gqs")
    np.savez(tmp_path / "other.npz", image=np.zeros(3))
    tmp_path.joinpath("text").write_text("hello")
    tmp_path.joinpath("empty").write_bytes(b"")
    for name in ("other.npz", "text", "empty", "."):
        with pytest.raises(DataError, match="cannot be read"):
            load_stats(tmp_path / name)


def test_truncated_files(stats_path: Path) -> None:
    """A file truncated anywhere is rejected."""
    data = stats_path.read_bytes()
    for size in range(0, len(data), 37):
        stats_path.write_bytes(data[:size])
        with pytest.raises(DataError):
            load_stats(stats_path)


def test_flipped_bits(stats_of_every_target: Stats, stats_path: Path) -> None:
    """A flipped bit raises a DataError or changes nothing."""
    data, chance = bytearray(stats_path.read_bytes()), random.Random(4)  # noqa: S311  # no secret
    for _ in range(600):
        place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        data[place] ^= bit
        stats_path.write_bytes(data)
        with contextlib.suppress(DataError):
            assert load_stats(stats_path) == stats_of_every_target
        data[place] ^= bit


def rewritten(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the header of the file with valid checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    change(header)
    members["header.json"] = json.dumps(header).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


HOSTILE = {
    "version": lambda h: h.update(version=2),
    "format": lambda h: h.update(format="pickle"),
    "unknown key": lambda h: h.update(extra=1),
    "no model": lambda h: h.pop("model"),
    "many bins": lambda h: h["tensors"][0].update(bins=1 << 19),
    "negative bins": lambda h: h["tensors"][0].update(bins=-1),
    "fewer bins": lambda h: h["tensors"][0].update(bins=3),
    "other bins": lambda h: (h["tensors"][0].update(bins=h["tensors"][0]["bins"] - 1), h["tensors"][1].update(bins=1)),
    "count": lambda h: h["tensors"][0].update(count=1),
    "huge count": lambda h: h["tensors"][0].update(count=10**30),
    "nan": lambda h: h["tensors"][0].update(nan=3),
    "bits": lambda h: h["tensors"][0].update(bits=9),
    "coarser bits": lambda h: h["tensors"][1].update(bits=7),
    "channels": lambda h: h["tensors"][0].update(channels=1),
    "no channels": lambda h: (h["tensors"][3].update(channels=5), h["tensors"][6].update(channels=0)),
    "many channels": lambda h: h["tensors"][3].update(channels=1 << 40),
    "twice": lambda h: h["tensors"].append(h["tensors"][0]),
    "twice without values": lambda h: h["tensors"].append(h["tensors"][4]),
    "bits without values": lambda h: h["tensors"][4].update(bits=9),
    "sum": lambda h: h["tensors"][0].update(low_sum="f" * 10**6),
    "no hex": lambda h: h["tensors"][0].update(fingerprint="xyz"),
    "text for number": lambda h: h["tensors"][0].update(port="0"),
    "true for number": lambda h: h["tensors"][0].update(port=True),
    "blocks twice": lambda h: h["runs"][0].update(block_ranges=[[0, 2], [1, 3]]),
    "blocks in adjacent ranges": lambda h: h["runs"][0].update(block_ranges=[[0, 2], [2, 3]]),
    "no blocks in a range": lambda h: h["runs"][0].update(block_ranges=[[2, 2]]),
    "blocks backwards": lambda h: h["runs"][0].update(block_ranges=[[2, 0]]),
    "blocks beyond": lambda h: h["runs"][0].update(block_ranges=[[0, 1000]]),
    "no samples": lambda h: h["runs"][0].update(block_size=0),
    "data twice": lambda h: h["runs"].append(h["runs"][0]),
    "hidden": lambda h: h["unobservable"][0].update(tensor=100),
    "also hidden": lambda h: h["unobservable"].append({"tensor": len(h["tensors"]), "reason": ""}),
    "count of 63 bits": lambda h: h["tensors"][0].update(blocks=1 << 62),
    "long text": lambda h: h["unobservable"][0].update(reason="x" * ((1 << 20) + 1)),
    "deep": lambda h: h.update(runs=eval("[" * 90 + "]" * 90)),  # noqa: S307  # a literal
    "list": lambda h: h.update(tensors={}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_inconsistent_headers(stats_path: Path, name: str) -> None:
    """Sizes, counts and ranges that do not match the arrays are rejected."""
    rewritten(stats_path, HOSTILE[name])
    with pytest.raises(DataError, match="cannot be read"):
        load_stats(stats_path)


@pytest.mark.parametrize(
    ("channels", "tensors", "reason"),
    [(1 << 24, 8, "'low'"), (1 << 24, 9, "too large"), ((1 << 24) + 1, 1, r"header\.json: tensors\.0\.channels: ")],
)
def test_size_limits(stats_path: Path, channels: int, tensors: int, reason: str) -> None:
    """Tensors may have 2**24 channels, and all arrays 2 GiB."""

    def enlarge(header: dict) -> None:
        entry = header["tensors"][3] | {"channels": channels, "bins": 0}
        header["tensors"] = [entry | {"port": port} for port in range(tensors)]

    rewritten(stats_path, enlarge)
    with pytest.raises(DataError, match=reason):
        load_stats(stats_path)


MAX_DROPPED_BITS = (1 << 16) - 1


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({"counts": [1, 3]}, True),
        ({"counts": [0, 4]}, False),
        ({"counts": [(1 << 40) - 1, 1], "count": 1 << 40}, True),
        ({"counts": [1 << 40, 1], "count": (1 << 40) + 1}, False),
        ({"sums": [2 * MAX_DROPPED_BITS, 0]}, True),
        ({"sums": [2 * MAX_DROPPED_BITS + 1, 0]}, False),
        ({"bins": [0x3F80, (1 << 16) - 1]}, True),
        ({"bins": [0x3F80, 1 << 16]}, False),
        ({"bins": [0x3F80, 0x3F80]}, False),
        ({"low": 3.0}, True),
        ({"low": 3.1}, False),
    ],
)
def test_limits_of_sketches(tmp_path: Path, changes: dict[str, Any], *, valid: bool) -> None:
    """A bin has 1 to 2**40 - 1 values, the sum of whose dropped bits is possible; bins ascend within 16 bits."""
    tensor, sketch = TensorRef("", "x"), sketched(np.array([1, 3], np.float32), None, 7)
    arrays_changed = {
        key: np.asarray(value, np.float64 if key == "low" else np.uint64)
        for key, value in changes.items()
        if key != "count"
    }
    sketch = replace(sketch, **{**changes, **arrays_changed})
    stats = Stats(model_digest="a", targets={tensor: ObservationTarget("b", None, 7)}, sketches={tensor: sketch})
    stats.save(tmp_path / "stats.gqs")
    with contextlib.nullcontext() if valid else pytest.raises(DataError, match="inconsistent"):
        assert load_stats(tmp_path / "stats.gqs") == stats


def test_missing_array(stats_path: Path) -> None:
    """A file without one of the arrays is rejected."""
    with zipfile.ZipFile(stats_path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != "sums"}
    with zipfile.ZipFile(stats_path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(DataError, match="'sums'"):
        load_stats(stats_path)


@pytest.mark.parametrize(
    ("declared_size", "reason"), [(None, "truncated"), (1 << 27, "truncated"), ((1 << 27) + 1, "no readable")]
)
def test_members_shorter_than_declared(stats_path: Path, declared_size: int | None, reason: str) -> None:
    """A header that ends before its declared size is rejected, although its checksum is right, as is one of 128 MiB."""
    data = bytearray(stats_path.read_bytes())
    position = data.index(b"PK\x01\x02") + 24  # of the size of the first member, in the central directory
    (size,) = struct.unpack_from("<I", data, position)
    struct.pack_into("<I", data, position, declared_size or size + 1)
    stats_path.write_bytes(data)
    with pytest.raises(DataError, match=reason):
        load_stats(stats_path)


def test_invalid_json(stats_path: Path) -> None:
    """Deep nesting, huge numbers and invalid JSON are rejected."""
    for text in (b"[" * 100_000, b"{" * 100, b'{"version": 1' + b"0" * 5000 + b"}", b"\xff\xfe", b"null"):
        with zipfile.ZipFile(stats_path, "w") as archive:
            archive.writestr("header.json", text)
        with pytest.raises(DataError):
            load_stats(stats_path)


@pytest.mark.slow
def test_zip_bombs(stats_path: Path) -> None:
    """An array larger than the header declares is rejected before it is unpacked."""
    with zipfile.ZipFile(stats_path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name in ("bins", "header.json"):
        with zipfile.ZipFile(stats_path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in members.items():
                archive.writestr(member, bytes(300 << 20) if member == name else data)
        with pytest.raises(DataError):
            load_stats(stats_path)


def test_inconsistent_numbers(stats_of_every_target: Stats, stats_path: Path) -> None:
    """Unordered or empty bins, impossible sums, and crossing or NaN extremes are rejected."""
    with zipfile.ZipFile(stats_path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def changed(name: str, dtype: str, index: int, value: float) -> bytes:
        values = np.frombuffer(members[name], dtype).copy()
        values[index] = value
        return values.tobytes()

    for name, dtype, index, value in (
        ("bins", "<u4", 0, 2**32 - 1),
        ("counts", "<i8", 0, 0),
        ("counts", "<i8", 0, -1),
        ("counts", "<i8", 0, 2**62),
        ("sums", "<u8", 0, 2**64 - 1),
        ("low", "<f8", 0, np.nan),
        ("low", "<f8", 0, 1e9),
        ("low", "<f8", 3, 1e9),  # one of four channels
        ("low", "<f8", 3, np.nan),
        ("high", "<f8", 3, np.nan),
        ("high", "<f8", 0, -np.inf),
    ):
        with zipfile.ZipFile(stats_path, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, changed(name, dtype, index, value) if member == name else data)
        with pytest.raises(DataError, match="inconsistent"):
            load_stats(stats_path)


def test_a_file_in_the_place_of_the_folder(stats_of_every_target: Stats, tmp_path: Path) -> None:
    """A file where the folder would be is reported, and stays as it is; a missing folder is created."""
    (tmp_path / "no").write_text("kept")
    with pytest.raises(UsageError, match=r"stats\.gqs cannot be written: "):
        stats_of_every_target.save(tmp_path / "no" / "stats.gqs")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    stats_of_every_target.save(tmp_path / "new" / "stats.gqs")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["stats.gqs"]
