"""Checkpoints are read exactly, and damaged or hostile ones raise ModelError."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data_files import encode_varint, mask_crc
from support.processes import run_python
from support.shared_models import SHARED_MODELS, needs_shared_models

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import checkpoint as module
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.checkpoint import Checkpoint
from graphquant.formats.tensorflow.object_graph import resolve_variables

ROOT = Path(__file__).parents[3]
KWS = SHARED_MODELS / "kws" / "saved_model"
SAMPLE = ROOT / "sample_models" / "digits_cnn_saved_model"

NUMBERS = {"float32": 1, "float64": 2, "int32": 3, "uint8": 4, "bool": 10, "qint8": 11, "bfloat16": 14}
NUMBERS |= {"complex64": 8, "float16": 19, "int4": 29, "string": 7, "resource": 20, "int64": 9}


def block(entries: list[tuple[bytes, bytes]], *, shared: bool = True) -> bytes:
    """Return the contents of a block with one restart."""
    out, last = b"", b""
    for key, value in entries:
        common = (
            next((at for at, (a, b) in enumerate(zip(last, key, strict=False)) if a != b), min(len(last), len(key)))
            * shared
        )
        out += (
            encode_varint(common) + encode_varint(len(key) - common) + encode_varint(len(value)) + key[common:] + value
        )
        last = key
    return out + bytes(4) + (1).to_bytes(4, "little")


def stored(contents: bytes, kind: int = 0) -> bytes:
    """Return a block with its trailer."""
    return contents + bytes([kind]) + mask_crc(contents + bytes([kind])).to_bytes(4, "little")


def table_file(blocks: list[tuple[bytes, int]]) -> bytes:
    """Return a table of data blocks (contents and compression), with an empty metadata block."""
    out, handles = b"", []
    for contents, kind in [*blocks, (block([]), 0)]:
        handles.append(encode_varint(len(out)) + encode_varint(len(contents)))
        out += stored(contents, kind)
    index = block([(b"k%d" % number, handle) for number, handle in enumerate(handles[:-1])])
    footer = handles[-1] + encode_varint(len(out)) + encode_varint(len(index))
    return out + stored(index) + footer.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")


def entry(name: str, dims: tuple[int, ...], start: int, data: bytes, /, shard: int = 0, **more: object) -> bytes:
    """Return a variable's entry, serialized; keywords override fields."""
    message = proto.BundleEntryProto(dtype=NUMBERS[name], shard_id=shard, offset=start, size=len(data))
    message.crc32c = mask_crc(data)
    for size in dims:
        message.shape.dim.add(size=size)
    for field, value in more.items():
        setattr(message, field, value)
    return proto.to_binary(message)


def header(**fields: object) -> bytes:
    """The header's entry."""
    return proto.to_binary(proto.BundleHeaderProto(**{"num_shards": 1, **fields}))


def write_checkpoint(folder: Path, entries: dict[bytes, bytes], *shards: bytes, **head: object) -> Path:
    """Write a checkpoint and return its prefix."""
    prefix = folder / "model"
    contents = block(sorted({b"": header(num_shards=len(shards), **head), **entries}.items()))
    Path(f"{prefix}.index").write_bytes(table_file([(contents, 0)]))
    for number, data in enumerate(shards):
        Path(f"{prefix}.data-{number:05d}-of-{len(shards):05d}").write_bytes(data)
    return prefix


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(2.5, np.float64),
    np.zeros((0, 3), np.int32),
    np.array([True, False]),
    np.array([1 + 2j, -3j], np.complex64),
    np.array([1.5, -2], ml_dtypes.bfloat16),
    np.array([1, -8, 7], ml_dtypes.int4),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_values_are_read_with_dtype_and_shape(tmp_path, array):
    """Every numeric type round-trips."""
    data = array.tobytes()
    prefix = write_checkpoint(tmp_path, {b"v": entry(array.dtype.name, array.shape, 3, data)}, b"abc" + data)
    opened = Checkpoint(prefix)
    assert list(opened.names) == ["v"]
    value = opened.read("v")
    assert value.dtype == array.dtype
    assert value.shape == array.shape
    assert value.tobytes() == data
    assert not value.flags.writeable


def test_quantized_types_are_read_as_integers(tmp_path):
    """Quantized variables are read as integers."""
    opened = Checkpoint(write_checkpoint(tmp_path, {b"q": entry("qint8", (2,), 0, b"\xff\x02")}, b"\xff\x02"))
    assert opened.read("q").dtype == np.int8
    assert opened.read("q").tolist() == [-1, 2]


@pytest.mark.parametrize("array", [a for a in ARRAYS if a.dtype.itemsize > 1], ids=lambda array: str(array.dtype))
def test_big_endian_values_are_byte_swapped(tmp_path, array):
    """A checkpoint of a big-endian machine gives the same values."""
    width = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    data = np.frombuffer(array.tobytes(), f"<u{width}").astype(f">u{width}").tobytes()
    prefix = write_checkpoint(tmp_path, {b"v": entry(array.dtype.name, array.shape, 0, data)}, data, endianness=1)
    assert Checkpoint(prefix).read("v").tobytes() == array.tobytes()


def test_shards_and_blocks(tmp_path):
    """Variables may be in several data files, and the index may have several blocks."""
    entries = {b"a/%03d" % number: entry("uint8", (1,), 0, bytes([number]), shard=number) for number in range(3)}
    prefix = write_checkpoint(tmp_path, entries, b"\0", b"\1", b"\2")
    index = [block([(b"", header(num_shards=3))]), *(block([table_entry]) for table_entry in entries.items())]
    Path(f"{prefix}.index").write_bytes(table_file([(contents, 0) for contents in index]))
    opened = Checkpoint(prefix)
    assert [opened.read(name).tolist() for name in opened.names] == [[0], [1], [2]]
    Path(f"{prefix}.data-00001-of-00003").unlink()
    assert opened.read("a/002").tolist() == [2]
    with pytest.raises(ModelError, match=r"model\.data-00001-of-00003 cannot be read"):
        opened.read("a/001")


def literal(data: bytes) -> bytes:
    """A literal in Snappy's raw format, with its length in two bytes."""
    return b"\xf4" + (len(data) - 1).to_bytes(2, "little") + data


def test_snappy_blocks_are_decompressed(tmp_path):
    """A compressed index equals a plain one, for every kind of element."""
    contents = block([(b"", header()), (b"aaaaaaaaaaaaaaaa", entry("uint8", (1,), 0, b"\7"))], shared=False)
    start = contents.index(b"a" * 16) + 1
    elements = [
        literal(contents[:start]),
        bytes([0b000_000_01, 1]),  # 4 bytes from 1 back
        bytes([6 - 1 << 2 | 2, 1, 0]),  # 6 bytes
        bytes([5 - 1 << 2 | 3, 1, 0, 0, 0]),  # 5 bytes
        literal(contents[start + 15 : -3]),
        bytes([2 << 2]) + contents[-3:],  # a literal with its length in the tag
    ]
    prefix = write_checkpoint(tmp_path, {}, b"\7")
    index = Path(f"{prefix}.index")
    index.write_bytes(table_file([(encode_varint(len(contents)) + b"".join(elements), 1)]))
    assert Checkpoint(prefix).read("a" * 16).tolist() == [7]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05\x00a",  # too short
        encode_varint(1 << 40) + b"\x00a",  # an impossible size
        b"\x05\x10a",  # a literal that is cut off
        b"\x04\x01\x01",  # copies from before the start
        b"\x05\x00a\x01\x00",  # copies from a distance of 0
        b"\x05\x00a\x01",  # a copy that is cut off
        b"\xff" * 11,
    ],
)
def test_bad_snappy_is_refused(tmp_path, data):
    """Hostile compressed blocks neither exhaust memory nor crash."""
    prefix = write_checkpoint(tmp_path, {}, b"")
    Path(f"{prefix}.index").write_bytes(table_file([(data, 1)]))
    with pytest.raises(ModelError, match=r"\.index .*readable"):
        Checkpoint(prefix)


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_random_snappy_is_bounded(data):
    """Only ModelError escapes from the decoder, and its output is bounded."""
    try:
        assert len(module._decompress_snappy(data)) <= 64 * len(data)
    except ModelError:
        return


# --- parts -----------------------------------------------------------------------------------------------------------


def partitioned(folder: Path, slices: list[tuple[int, int]], values: list[np.ndarray], rows: int = 4) -> Path:
    """Write a variable of `rows` x 2 that was saved in slices of rows (start, length)."""
    full_entry = proto.BundleEntryProto(dtype=1)
    full_entry.shape.dim.add(size=rows)
    full_entry.shape.dim.add(size=2)
    entries, data = {}, b""
    for (start, length), value in zip(slices, values, strict=True):
        saved_slice = full_entry.slices.add()
        saved_slice.extent.add(start=start, length=length)
        saved_slice.extent.add()
        key = module._slice_key("w", [(start, length), (0, -1)])
        entries[key] = entry("float32", value.shape, len(data), value.tobytes())
        data += value.tobytes()
    return write_checkpoint(folder, {b"w": proto.to_binary(full_entry), **entries}, data)


def test_slices_are_assembled(tmp_path):
    """A partitioned variable is assembled, and its slices are not listed."""
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    opened = Checkpoint(partitioned(tmp_path, [(0, 3), (3, 1)], [value[:3], value[3:]]))
    assert list(opened.names) == ["w"]
    assert opened.read("w").dtype == np.float32
    assert np.array_equal(opened.read("w"), value)


@pytest.mark.parametrize(
    ("parts", "rows", "match"),
    [
        ([(0, 3)], 4, "'w' .*(larger|cover)"),
        ([(0, 3), (2, 2)], 4, "overlap"),
        ([(0, 3), (3, 2)], 4, "lies outside"),
        ([(-1, 3), (2, 2)], 4, "lies outside"),
        ([(0, 3), (3, 1)], 1 << 40, "'w' .*larger"),
        ([(0, 1)], 0, "lies outside"),
    ],
)
def test_bad_slices_are_refused(tmp_path, parts, rows, match):
    """Slices must cover the variable exactly."""
    values = [np.zeros((length, 2), np.float32) for _, length in parts]
    opened = Checkpoint(partitioned(tmp_path, parts, values, rows))
    with pytest.raises(ModelError, match=match):
        opened.read("w")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "80"), (63, "bf"), (-1, "7f"), (-64, "40"), (64, "c040"), (-65, "3fbf"), (1 << 62, "ffc0" + "40" + 7 * "00")],
)
def test_numbers_in_keys_sort(value, expected):
    """The encoding of slice keys equals values computed by hand."""
    assert module._encode_ordered(value).hex() == expected


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=2))
def test_encoded_numbers_sort_like_numbers(values):
    """Encoded numbers sort like the numbers."""
    assert sorted(values) == sorted(values, key=module._encode_ordered)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path):
    """A small checkpoint of one variable, `v` = [1, 2, 3]."""
    data = np.array([1, 2, 3], np.float32).tobytes()
    return write_checkpoint(tmp_path, {b"v": entry("float32", (3,), 0, data)}, data)


def test_flipped_byte_in_the_data_is_noticed(prefix):
    """The error names file and variable."""
    path = Path(f"{prefix}.data-00000-of-00001")
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.data-00000-of-00001: .*checksum .*'v'"):
        Checkpoint(prefix).read("v")


def test_short_data_is_noticed(prefix):
    """A truncated data file and a damaged one give different errors."""
    Path(f"{prefix}.data-00000-of-00001").write_bytes(b"123")
    with pytest.raises(ModelError, match=r"model\.data-00000-of-00001: .*'v' .*outside"):
        Checkpoint(prefix).read("v")


def test_index_of_every_shorter_length_is_refused(prefix):
    """A truncated index is never read as a smaller checkpoint."""
    path = Path(f"{prefix}.index")
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"model\.index"):
            Checkpoint(prefix)


def test_missing_index(tmp_path):
    """The error names the missing file."""
    with pytest.raises(ModelError, match=r"nothing\.index cannot be read"):
        Checkpoint(tmp_path / "nothing")


def test_unknown_variable(prefix):
    """The error for a misspelled name suggests the right one."""
    opened = Checkpoint(prefix)
    assert "v" in opened.names
    assert "w" not in opened.names
    with pytest.raises(ModelError, match="no variable 'vv'"):
        opened.read("vv")


@pytest.mark.parametrize(
    ("dtype", "shape", "more", "match"),
    [
        ("float32", (3,), {"shard_id": 1}, "data file 1 of 1"),
        ("float32", (3,), {"shard_id": -1}, "data file -1 of 1"),
        ("float32", (3,), {"offset": 1}, "'v' lies outside"),
        ("float32", (3,), {"offset": -1}, "'v' lies outside"),
        ("float32", (3,), {"offset": (1 << 63) - 1}, "'v' lies outside"),
        ("float32", (3,), {"size": 8}, "8 bytes.* 12"),
        ("float32", (1 << 40,), {"size": 1 << 42}, "'v' lies outside"),
        ("float32", (1 << 62, 1 << 62), {}, "impossible shape"),
        ("float32", (0, 1 << 62), {"size": 0}, "impossible shape"),
        ("float32", (-3,), {}, "impossible shape"),
        ("float32", (1,) * 65, {}, "impossible shape"),
        ("float32", (4,), {}, "12 bytes.* 16"),
        ("float32", (3,), {"dtype": 999}, "unknown type"),
        ("float32", (3,), {"dtype": 0}, "unknown type"),
        ("string", (3,), {}, "'v' .*type string"),
        ("resource", (3,), {}, "'v' .*type resource"),
    ],
)
def test_hostile_entries_are_refused(tmp_path, dtype, shape, more, match):
    """Every claim of an entry is checked before use."""
    data = bytes(12)
    opened = Checkpoint(write_checkpoint(tmp_path, {b"v": entry(dtype, shape, 0, data, **more)}, data))
    with pytest.raises(ModelError, match=match):
        opened.read("v")


@pytest.mark.parametrize(
    ("contents", "match"),
    [
        (block([(b"v", b"")]), "no header"),
        (block([(b"", header(num_shards=0))]), "impossible number"),
        (block([(b"", header(num_shards=1 << 30))]), "impossible number"),
        (block([(b"", header(version=proto.message_class("VersionDef")(min_consumer=2)))]), "version 2"),
        (block([(b"", b"\xff")]), "header of .*readable"),
        (block([(b"", header()), (b"\xff", b"")]), "name .*text"),
        (block([(b"", header()), (b"b", b""), (b"a", b"")]), "out of order"),
        (b"\1\1\1xx" + bytes(4) + b"\1\0\0\0", "outside its block"),
        (b"\0\xff\xff\1\1xx" + bytes(4) + b"\1\0\0\0", "outside its block"),
        (b"\xff\xff\xff\xff", "more restarts"),
        (b"", "too short"),
    ],
)
def test_hostile_indexes_are_refused(tmp_path, contents, match):
    """Blocks with valid checksums and invalid contents are refused."""
    (tmp_path / "model.index").write_bytes(table_file([(contents, 0)]))
    with pytest.raises(ModelError, match=match):
        Checkpoint(tmp_path / "model")


def test_keys_cannot_exhaust_memory():
    """Prefix compression lets a small file claim huge keys; a limit stops it early."""
    long = b"a" * (1 << 20)
    entries = b"\0" + encode_varint(len(long)) + b"\0" + long
    entries += b"".join(encode_varint(len(long) + number) + b"\1\0b" for number in range(500))
    data = table_file([(entries + bytes(4) + b"\1\0\0\0", 0)])
    with pytest.raises(ModelError, match="keys"):
        module.read_table(data, source="x")


def test_unknown_compression_is_refused(tmp_path):
    """Only supported compressions are accepted."""
    (tmp_path / "model.index").write_bytes(table_file([(block([]), 4)]))
    with pytest.raises(ModelError, match="compression 4"):
        Checkpoint(tmp_path / "model")


def read_checkpoint(prefix: Path) -> None:
    """Read everything in a checkpoint; only ModelError may be raised."""
    try:
        opened = Checkpoint(prefix)
        opened.object_graph()
        names = opened.names
    except ModelError:
        return
    for name in names:
        try:
            opened.read(name)
        except ModelError:
            continue


@pytest.fixture(scope="module")
def written_checkpoint(tmp_path_factory):
    """A checkpoint with a plain and a partitioned variable, and a string in place of the object graph."""
    folder = tmp_path_factory.mktemp("fuzz")
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    prefix = partitioned(folder, [(0, 3), (3, 1)], [value[:3], value[3:]])
    entries = module.read_table(Path(f"{prefix}.index").read_bytes(), source="it")
    entries[b"v"] = entry("float32", (2, 2), 0, value.tobytes()[:16])
    entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry("string", (), 0, value.tobytes()[:9])
    contents = block(sorted(entries.items()))
    Path(f"{prefix}.index").write_bytes(table_file([(contents, 0)]))
    return prefix, contents


edits = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=6)


def replace_bytes(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    """Return the data with some bytes replaced."""
    out = bytearray(data)
    for at, byte in changes:
        out[at % len(out)] = byte
    return bytes(out)


@given(changes=edits)
@settings(max_examples=200, deadline=None)
@example(changes=[(-9, 255)])
def test_fuzzed_index_file(written_checkpoint, changes):
    """Damage anywhere in the index is refused, mostly by checksums."""
    prefix, contents = written_checkpoint
    Path(f"{prefix}.index").write_bytes(replace_bytes(table_file([(contents, 0)]), changes))
    read_checkpoint(prefix)


@pytest.mark.slow
@given(changes=edits)
@settings(max_examples=500, deadline=None)
def test_fuzzed_index_with_good_checksums(written_checkpoint, changes):
    """Damage with valid checksums is refused: keys, entries, shapes, offsets."""
    prefix, contents = written_checkpoint
    Path(f"{prefix}.index").write_bytes(table_file([(replace_bytes(contents, changes), 0)]))
    read_checkpoint(prefix)


@given(data=st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_random_index(written_checkpoint, data):
    """Random bytes are refused."""
    prefix, _ = written_checkpoint
    Path(f"{prefix}.index").write_bytes(data)
    read_checkpoint(prefix)


# --- names -----------------------------------------------------------------------------------------------------------


def object_graph(*variables: tuple[str, str]) -> bytes:
    """Return an object graph of variables, each with a full name and a key."""
    graph = proto.TrackableObjectGraph()
    for full_name, key in variables:
        graph.nodes.add().attributes.add(name="VARIABLE_VALUE", full_name=full_name, checkpoint_key=key)
    return proto.to_binary(graph)


def string_entry(text: bytes) -> tuple[bytes, bytes]:
    """Data and entry of a scalar string."""
    length = len(text).to_bytes(4, "little")
    cksum = mask_crc(length).to_bytes(4, "little")
    data = encode_varint(len(text)) + cksum + text
    return data, entry("string", (), 0, data, crc32c=mask_crc(length + cksum + text))


def named(folder: Path, *keys: str, graph: bytes = b"") -> Checkpoint:
    """Return a checkpoint with these keys and an object graph."""
    data, entries = b"", {}
    if graph:
        data, entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = string_entry(graph)
    entries |= {key.encode(): entry("uint8", (0,), 0, b"") for key in keys}
    return Checkpoint(write_checkpoint(folder, entries, data))


def handles(graph, *names: str, op: str = "VarHandleOp", **shared: str) -> None:
    """Add variables to a graph or to a function's nodes; `shared` maps nodes to different shared names."""
    for name in names:
        node = graph.add(name=name, op=op)
        node.attr["shared_name"].s = shared.get(name, name).encode()


def restore(nodes, targets: dict[str, str], *, function: bool, slices: str = "") -> None:
    """Add a saver's restore ops: one RestoreV2, and an identity and an assignment for each variable."""
    for name, values in (("names", list(targets.values())), ("slices", [slices])):
        constant = nodes.add(name=name, op="Const")
        constant.attr["value"].tensor.string_val.extend(value.encode() for value in values)
    outputs = (":output:0", ":tensors:%d", ":output:0") if function else ("", ":%d", "")
    nodes.add(name="restore", op="RestoreV2", input=["prefix", "names" + outputs[0], "slices" + outputs[0]])
    for index, target in enumerate(targets):
        nodes.add(name=f"identity_{index}", op="Identity", input=["restore" + outputs[1] % index])
        value = f"identity_{index}{outputs[2]}"
        nodes.add(name=f"assign_{index}", op="AssignVariableOp", input=[target, value])


def test_restore_function_decides(tmp_path):
    """The restore function distinguishes two variables of the same name."""
    saved = proto.SavedModel()
    graph = saved.meta_graphs.add().graph_def
    handles(graph.node, "kernel", "kernel_1")
    graph.node.add(name="call", op="StatefulPartitionedCall", input=["prefix", "kernel_1", "kernel:0"])
    graph.node[-1].attr["f"].func.name = "load"
    body = graph.library.function.add()
    body.signature.name = "load"
    for name in ("prefix", "x", "y"):
        body.signature.input_arg.add(name=name)
    restore(body.node_def, {"x": "a", "y": "b"}, function=True)
    opened = named(tmp_path, "a", "b", graph=object_graph(("kernel", "a"), ("kernel", "b")))
    before = proto.to_binary(saved)
    assert resolve_variables(saved.meta_graphs, opened) == {"kernel": "b", "kernel_1": "a"}
    assert proto.to_binary(saved) == before


def test_restore_nodes_decide(tmp_path):
    """A TF1 saver restores in the graph itself."""
    saved = proto.SavedModel()
    graph = saved.meta_graphs.add().graph_def
    handles(graph.node, "v")
    handles(graph.node, "r", op="VariableV2")
    restore(graph.node, {"v": "ema/v", "r": "r"}, function=False)
    assert resolve_variables(saved.meta_graphs, named(tmp_path, "ema/v", "v", "r")) == {"v": "ema/v", "r": "r"}


def test_slices_of_partitioned_variables_have_no_key(tmp_path):
    """A slice has no key and is not looked up by name."""
    saved = proto.SavedModel()
    graph = saved.meta_graphs.add().graph_def
    handles(graph.node, "w/part_0")
    restore(graph.node, {"w/part_0": "w"}, function=False, slices="4 2 0,2:-")
    assert resolve_variables(saved.meta_graphs, named(tmp_path, "w", "w/part_0")) == {}


def test_names_are_looked_up_in_the_object_graph(tmp_path):
    """Without a saver the object graph maps unambiguous names to keys."""
    saved = proto.SavedModel()
    graph = saved.meta_graphs.add().graph_def
    handles(graph.node, "d/kernel", "twice", "node", node="d/bias")
    handles(graph.library.function.add().node_def, "inside")
    full_names = [("d/kernel", "k"), ("d/bias", "b"), ("inside", "i"), ("twice", "k"), ("twice", "b")]
    opened = named(tmp_path, "k", "b", "i", graph=object_graph(*full_names))
    assert resolve_variables(saved.meta_graphs, opened) == {"d/kernel": "k", "node": "b", "d/bias": "b", "inside": "i"}


def test_names_may_be_keys(tmp_path):
    """TF1 uses a variable's name as its key; names missing in the checkpoint are omitted."""
    saved = proto.SavedModel()
    handles(saved.meta_graphs.add().graph_def.node, "v", "absent")
    assert resolve_variables(saved.meta_graphs, named(tmp_path, "v")) == {"v": "v"}


def test_ambiguous_names_have_no_key(tmp_path):
    """A name that two graphs of one model restore from different keys is omitted."""
    saved = proto.SavedModel()
    for key in ("a", "b"):
        graph = saved.meta_graphs.add().graph_def
        handles(graph.node, "v")
        restore(graph.node, {"v": key}, function=False)
    assert resolve_variables(saved.meta_graphs, named(tmp_path, "a", "b")) == {}


def test_cyclic_and_incomplete_restores_are_ignored(tmp_path):
    """Graphs that TensorFlow would reject do no harm."""
    saved = proto.SavedModel()
    graph = saved.meta_graphs.add().graph_def
    handles(graph.node, "v")
    graph.node.add(name="ring", op="Identity", input=["ring"])
    graph.node.add(name="stump", op="Identity")
    graph.node.add(name="short", op="RestoreV2", input=["prefix"])
    graph.node.add(name="lost", op="RestoreV2", input=["prefix", "x", "y"])
    for value in ("ring", "stump", "short", "lost:99999999999999", "nowhere"):
        graph.node.add(name=f"assign_{value[:4]}", op="AssignVariableOp", input=["v", value])
    graph.node.add(name="bare", op="AssignVariableOp")
    graph.node.add(name="call", op="PartitionedCall").attr["f"].func.name = "nowhere"
    assert resolve_variables(saved.meta_graphs, named(tmp_path, "v")) == {"v": "v"}


def test_damaged_object_graph_is_refused(tmp_path):
    """A flipped byte in the object graph is detected."""
    opened = named(tmp_path, "k", graph=object_graph(("v", "k")))
    path = tmp_path / "model.data-00000-of-00001"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(ModelError, match="_CHECKPOINTABLE_OBJECT_GRAPH"):
            opened.object_graph()


@pytest.mark.parametrize(("path", "count"), [(SAMPLE, 33), pytest.param(KWS, 141, marks=needs_shared_models)])
def test_every_variable_of_a_real_model_resolves(path, count):
    """The variables of a classifier and of the keyword spotter have the shapes and dtypes of the checkpoint."""
    saved = proto.parse_binary((path / "saved_model.pb").read_bytes(), proto.SavedModel())
    opened = Checkpoint(path / "variables" / "variables")
    keys = resolve_variables(saved.meta_graphs, opened)
    variables = [node for node in saved.meta_graphs[0].graph_def.node if node.op == "VarHandleOp"]
    assert len(variables) == count
    assert len({keys[node.name] for node in variables}) == count
    for node in variables:
        shape = tuple(dim.size for dim in node.attr["shape"].shape.dim)
        value = opened.read(keys[node.name])
        assert (value.dtype.name, value.shape) == (proto.dtype_name(node.attr["dtype"].type), shape)


# --- against TensorFlow ----------------------------------------------------------------------------------------------

COMPARE = """
import sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from graphquant.formats.tensorflow.checkpoint import Checkpoint
theirs, ours = tf.train.load_checkpoint(sys.argv[1]), Checkpoint(Path(sys.argv[1]))
shapes = theirs.get_variable_to_shape_map()
assert sorted(shapes) == list(ours.names), (sorted(shapes), list(ours.names))
for name in ours.names:
    if theirs.get_variable_to_dtype_map()[name] == tf.string:
        continue
    value, expected = ours.read(name), np.asarray(theirs.get_tensor(name))
    assert list(value.shape) == shapes[name], name
    assert value.dtype == expected.dtype and value.tobytes() == expected.tobytes(), name
if ours.object_graph() is not None:
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph
    graph = TrackableObjectGraph.FromString(theirs.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    assert graph.SerializeToString(deterministic=True) == ours.object_graph().SerializeToString(deterministic=True)
print(len(ours.names))
"""

WRITE = """
import sys
import numpy as np
import tensorflow as tf
tf1 = tf.compat.v1
out = sys.argv[1]
class Model(tf.Module):
    def __init__(self):
        self.a = tf.Variable(np.arange(6, dtype="f4").reshape(2, 3), name="kernel")
        self.b = tf.Variable(np.ones((3, 2), "f4"), name="kernel")
        self.h = tf.Variable(tf.cast([1.5, 2], tf.bfloat16))
        self.s = tf.Variable(["x", "yy"])
        self.e = tf.Variable(np.zeros((0, 3), "f4"))
        self.t = tf.Variable([True, False])
        self.c = tf.Variable([1 + 2j], dtype=tf.complex64)
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def call(self, x):
        return x @ self.a @ self.b
tf.saved_model.save(Model(), out + "/tf2")
with tf1.Graph().as_default(), tf1.Session() as session:
    split = tf1.fixed_size_partitioner(3)
    w = tf1.get_variable("w", [200, 4], initializer=tf1.random_normal_initializer(), partitioner=split)
    tf1.get_variable("r", initializer=np.arange(4, dtype="i8"), use_resource=True)
    session.run(tf1.global_variables_initializer())
    inputs = {"x": tf1.placeholder(tf.float32, [None, 200])}
    outputs = {"y": tf.matmul(inputs["x"], tf.convert_to_tensor(w))}
    tf1.saved_model.simple_save(session, out + "/tf1", inputs, outputs)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "count"), [(SAMPLE, 34), pytest.param(KWS, 142, marks=needs_shared_models)])
def test_real_values_equal_those_of_tensorflow(path, count):
    """The checkpoints of a classifier and of the keyword spotter equal TensorFlow's values, byte for byte."""
    assert run_python(COMPARE, str(path / "variables" / "variables")) == str(count)


@pytest.mark.slow
def test_written_values_equal_those_of_tensorflow(tmp_path):
    """New checkpoints of TensorFlow: dtypes, equal names, strings, partitioned variables."""
    run_python(WRITE, str(tmp_path))
    assert run_python(COMPARE, str(tmp_path / "tf2/variables/variables")) == "8"
    assert run_python(COMPARE, str(tmp_path / "tf1/variables/variables")) == "2"
    saved = proto.parse_binary((tmp_path / "tf2/saved_model.pb").read_bytes(), proto.SavedModel())
    keys = resolve_variables(saved.meta_graphs, Checkpoint(tmp_path / "tf2/variables/variables"))
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    shapes = {
        node.name: [dim.size for dim in node.attr["shape"].shape.dim]
        for node in saved.meta_graphs[0].graph_def.node
        if node.op == "VarHandleOp"
    }
    kernels = {key: shapes[name] for name, key in keys.items() if name.startswith("kernel")}
    assert kernels == {"a" + suffix: [2, 3], "b" + suffix: [3, 2]}
    assert shapes.keys() == keys.keys()
