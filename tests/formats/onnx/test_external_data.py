"""External weights files: when they are written, that they load unchanged, and that none is lost."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from support.cli import run_cli
from support.rule_files import write_int4_rules

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.backends import judge_ops
from graphquant.cli import insert as insert_module
from graphquant.errors import ModelError, UsageError
from graphquant.formats import onnx as format_
from graphquant.formats import weights_files
from graphquant.formats.onnx import external_data, file_writer, session, tensors
from graphquant.formats.onnx.external_data import constant_bytes
from graphquant.numerics import affine
from graphquant.observers import histogram_kernel
from graphquant.quantize import solver

FEED = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64), "c": np.array(True)}


def write_branched_model(folder: Path, *, external: bool) -> Path:
    """Write a model with a MatMul in the main graph and in both branches of an If, and a weight in a Constant node."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in ("w", "k", "a", "b")}
    arrays["bias"] = rng.standard_normal(512).astype(np.float32)
    tensors = {name: numpy_helper.from_array(value, name) for name, value in arrays.items()}
    if external:
        with folder.joinpath("m.data").open("wb") as file:
            for tensor in tensors.values():
                tensor.data_location = onnx.TensorProto.EXTERNAL
                span = (("location", "m.data"), ("offset", file.tell()), ("length", len(tensor.raw_data)))
                file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                for key, value in span:
                    tensor.external_data.add(key=key, value=str(value))
    branches = {
        f"{branch}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["p", name], [f"o{name}"])],
            branch,
            [],
            [helper.make_tensor_value_info(f"o{name}", 1, [1, 64])],
            [tensors[name]],
        )
        for branch, name in (("then", "a"), ("else", "b"))
    }
    nodes = [
        helper.make_node("Constant", [], ["k"], value=tensors["k"]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("MatMul", ["m", "k"], ["p"]),
        helper.make_node("If", ["c"], ["q"], **branches),
        helper.make_node("Expand", ["q", "size"], ["e"]),
        helper.make_node("Reshape", ["e", "flat"], ["f"]),
        helper.make_node("Add", ["f", "bias"], ["y"]),
    ]
    shape_tensors = [numpy_helper.from_array(np.array(v), n) for n, v in (("size", [8, 64]), ("flat", [512]))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 64]), helper.make_tensor_value_info("c", 9, [])],
        [helper.make_tensor_value_info("y", 1, [512])],
        [tensors["w"], tensors["bias"], *shape_tensors],
    )
    message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path = folder / "m.onnx"
    path.write_bytes(message.SerializeToString())
    return path


def session_outputs(path: Path) -> Any:
    """Return the output that onnxruntime computes with the file."""
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, FEED)[0]


def weight_files(path: Path) -> list[str]:
    """Return the names of the weights files of the model at `path`."""
    return sorted(file.name for file in path.parent.glob(f"{path.name}.{'[0-9a-f]' * 16}.data"))


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("rules", ["weight_only", "weight_only_int4"])
def test_external_weights_compute_the_same(
    external: bool, rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All large tensors, also in bodies and Constant nodes, go to one file; the model computes the same."""
    source = write_branched_model(tmp_path, external=external)
    result = gq.insert(source, rules=rules, family="onnx-qdq")
    result.save(tmp_path / "inside.onnx")
    assert not weight_files(tmp_path / "inside.onnx")
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    if not external:
        monkeypatch.setattr(file_writer, "MAX_MESSAGE_BYTES", 5000)
    output_folder = tmp_path / "elsewhere"
    output_folder.mkdir()
    saved_path = result.save(output_folder / "q.onnx")
    assert sorted(path.name for path in output_folder.iterdir()) == ["q.onnx", *weight_files(saved_path)]
    assert len(weight_files(saved_path)) == 1
    assert saved_path.stat().st_size < 5000
    onnx.checker.check_model(str(saved_path), full_check=True)
    np.testing.assert_array_equal(session_outputs(saved_path), session_outputs(tmp_path / "inside.onnx"))
    assert [str(reading.tensor) for reading in summarize_model(gq.load(saved_path)).quantization_ops] == [
        str(reading.tensor) for reading in summarize_model(result.model).quantization_ops
    ]
    assert len(result.inserted) == 4


def test_external_weights_are_deterministic_and_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same input gives the same two files; the float bias is in the second one, aligned."""
    source = write_branched_model(tmp_path, external=True)
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    saved_files = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        gq.insert(source, rules="weight_only").save(folder / "q.onnx")
        saved_files.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert saved_files[0] == saved_files[1]
    (name,) = saved_files[0].keys() - {"q.onnx"}
    assert name == f"q.onnx.{hashlib.sha256(saved_files[0][name]).hexdigest()[:16]}.data"
    message = onnx.load(tmp_path / "one/q.onnx", load_external_data=False)
    locations = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in message.graph.initializer
    }
    assert locations["bias"]["location"] == name
    assert int(locations["bias"]["offset"]) % 64 == 0
    assert locations["size"] == {}  # too small
    assert 4 * 64 * 64 + 2048 <= len(saved_files[0][name]) < 4 * 64 * 64 + 2048 + 4 * 64 * 4 + 10 * 64


def test_progress_of_external_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weights file reports the bytes of each tensor in it up to its size; a model without one reports nothing."""
    source = write_branched_model(tmp_path, external=True)
    model, calls = gq.insert(source, rules="weight_only").model, list[tuple[str, int, int]]()
    monkeypatch.setattr(external_data, "MEGABYTE", 1)
    gq.save(model, tmp_path / "inside.onnx", progress=lambda *call: calls.append(call))
    assert calls == []
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    path = gq.save(model, tmp_path / "q.onnx", progress=lambda *call: calls.append(call))
    sizes = [done for _, done, _ in calls]
    assert {stage for stage, _, _ in calls} == {"writing weights, MB"}
    assert len(set(sizes)) > 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == calls[-1][2] == tmp_path.joinpath(*weight_files(path)).stat().st_size


def test_replacing_a_model_removes_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing a model deletes its weights and unreferenced ones; files with similar names stay."""
    source = write_branched_model(tmp_path, external=True)
    folder, path = tmp_path / "made", tmp_path / "made/q.onnx"
    folder.mkdir()
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    unrelated_files = [folder / name for name in ("q.onnx.data", "q.onnx.0123.data", "r.onnx.0123456789abcdef.data")]
    for unrelated_file in unrelated_files:
        unrelated_file.write_bytes(b"mine")
    path.with_name("q.onnx.0123456789abcdef.data").write_bytes(b"left by a killed process")
    eight, four = (gq.insert(source, rules=rules) for rules in ("weight_only", "weight_only_int4"))
    eight.save(path)
    (first,) = weight_files(path)
    four.save(path, force=True)
    (second,) = weight_files(path)
    assert first != second
    assert not path.with_name(first).exists()
    monkeypatch.undo()
    eight.save(path, force=True)  # its new weights are in the message, and the float bias is linked
    assert sorted(folder.iterdir()) == sorted([path, folder / "m.data", *unrelated_files])
    assert [unrelated_file.read_bytes() for unrelated_file in unrelated_files] == [b"mine"] * 3


def test_weights_of_copied_models_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a replaced model in the same folder keeps its weights, whatever its name, even if truncated."""
    source = write_branched_model(tmp_path, external=True)
    path, copies = tmp_path / "q.onnx", [tmp_path / name for name in ("kept.onnx", "q.onnx.bak", "best.pb", "v1")]
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    eight, four = (gq.insert(source, rules=rules) for rules in ("weight_only", "weight_only_int4"))
    eight.save(path)
    expected, (first,) = session_outputs(path), weight_files(path)
    for copy in copies:
        shutil.copy(path, copy)
    tmp_path.joinpath("q.onnx.intoto.json").write_text(json.dumps({"location": first}), "utf-8")
    truncated = tmp_path / "torn.onnx"
    truncated.write_bytes(path.read_bytes()[:-1])
    four.save(path, force=True)
    for copy in copies:
        np.testing.assert_array_equal(session_outputs(copy), expected)
        assert tmp_path.joinpath(first).exists()
        copy.unlink()
        four.save(path, force=True)
    assert tmp_path.joinpath(first).exists()
    monkeypatch.setattr(weights_files, "MAX_SEARCHED_BYTES", 10)
    truncated.unlink()
    four.save(path, force=True)
    assert tmp_path.joinpath(first).exists()
    monkeypatch.setattr(weights_files, "MAX_SEARCHED_BYTES", 1 << 20)
    four.save(path, force=True)
    assert not tmp_path.joinpath(first).exists()
    assert len(weight_files(path)) == 1


def test_external_data_is_copied_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """External data is copied completely or not at all, before the model is written."""
    result = gq.insert(write_branched_model(tmp_path, external=True), rules="weight_only")
    path = tmp_path / "made/q.onnx"
    path.parent.mkdir()
    listings: list[list[str]] = []

    def refuse_link(_origin: Any, _target: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    def fail_halfway(source: Any, target: Any) -> None:
        target.write(source.read(100))
        listings.append([file.name for file in path.parent.iterdir() if file.suffix != ".lock"])

        raise OSError(errno.ENOSPC, "disk-full")

    monkeypatch.setattr(file_writer.os, "link", refuse_link)
    with monkeypatch.context() as patched:
        patched.setattr(file_writer.shutil, "copyfileobj", fail_halfway)
        with pytest.raises(UsageError, match="disk-full"):
            result.save(path)
    assert [re.sub(r"\d+\.[0-9a-f]{8}", "N", name) for name in listings[0]] == [".q.onnx.data.N.part"]
    assert list(path.parent.iterdir()) == []
    result.save(path)
    assert path.with_name("m.data").read_bytes() == tmp_path.joinpath("m.data").read_bytes()
    assert session_outputs(path).shape == (512,)


def test_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the previous files stay, and no partial file remains."""
    source = write_branched_model(tmp_path, external=True)
    result = gq.insert(source, rules="weight_only")
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    result.save(tmp_path / "q.onnx")
    names = sorted(path.name for path in tmp_path.iterdir())
    contents = [tmp_path.joinpath(name).read_bytes() for name in names]

    def fail_on_full_disk(_message: Any, _ops: Any, _folder: Any, file: Any, _progress: Any) -> None:
        file.write(b"half")

        raise OSError(errno.ENOSPC, "disk-full")

    monkeypatch.setattr(file_writer, "write_external_weights", fail_on_full_disk)
    with pytest.raises(UsageError, match=r"q\.onnx .*: disk-full"):
        result.save(tmp_path / "q.onnx", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [tmp_path.joinpath(name).read_bytes() for name in names] == contents


REPLACE_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import graphquant as gq
from graphquant.formats.onnx import file_writer

file_writer.EXTERNALIZE_BYTES, path, folder = 0, Path(sys.argv[2]), Path(sys.argv[2]).parent
results = [gq.insert(sys.argv[1], rules=rules) for rules in ("weight_only", "weight_only_int4")]
moments = {"open", "os.rename", "os.remove"}

def child(nth, limit, count):
    def hook(event, arguments):
        nonlocal count
        if event in moments and str(folder) in str(arguments[0]):
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
    if limit:
        sys.addaudithook(hook)
    while True:
        results[nth % 2].save(path, force=True)
        nth += 1
        if limit:
            os._exit(0)

for line in sys.stdin:  # which result is first, and at which step, or after how many seconds, it is killed
    nth, step, seconds = line.split()
    process = os.fork()
    if not process:
        child(int(nth), int(step), 0)
    if float(seconds):
        time.sleep(float(seconds))
        os.kill(process, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
"""Replaces a model by itself and another in turn, in processes that are killed."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_kill_while_replacing_leaves_a_complete_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at any step, the old or new model is complete, and the next save cleans up."""
    source, path = write_branched_model(tmp_path, external=True), tmp_path / "made/q.onnx"
    path.parent.mkdir()
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    results = [gq.insert(source, rules=rules) for rules in ("weight_only", "weight_only_int4")]
    expected = [session_outputs(result.save(path, force=True)) for result in results]
    exit_codes: list[int] = []
    outcomes, now = set(), 1
    steps = takewhile(lambda _: 0 not in exit_codes, range(1, 100))  # past the last step nothing is killed
    kill_points = chain(((step, 0.0) for step in steps), ((0, 0.02 + 0.0137 * turn) for turn in range(20)))
    command = [sys.executable, "-c", REPLACE_SCRIPT, str(source), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step, seconds in kill_points:
            print(1 - now, step, seconds, file=process.stdin, flush=True)
            exit_codes.append(int(process.stdout.readline()))
            actual = session_outputs(path)
            same = [np.array_equal(actual, candidate) for candidate in expected]
            assert any(same), (step, seconds)
            outcomes.add((len(weight_files(path)), same[now]))
            now = same.index(True)
            gq.insert(source, rules="weight_only" if now == 0 else "weight_only_int4").save(path, force=True)
            assert len(weight_files(path)) == 1
            np.testing.assert_array_equal(session_outputs(path), expected[now])
        process.stdin.close()
    assert exit_codes[0] == exit_codes[-1] == -signal.SIGKILL
    assert 0 in exit_codes
    assert outcomes >= {
        (1, True),
        (2, True),
        (2, False),
        (1, False),
    }  # nothing done, weights, model, and the old ones gone


class Interruption:
    """Counts the searched weights and written tensors of commands, and interrupts after some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts, self.limits = {"searched": 0, "written": 0}, {"searched": 99, "written": 99}
        monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
        monkeypatch.setattr(insert_module, "MIN_RESUMABLE_BYTES", 0)
        for name, (owner, function) in {
            "searched": (solver, "search_block_params"),
            "written": (weights_files.HashingWriter, "finish_tensor"),
        }.items():
            monkeypatch.setattr(owner, function, self.interrupt(name, getattr(owner, function)))

    def interrupt(self, name: str, function: Any) -> Any:
        """Return the function with its calls counted."""

        def count(*args: Any) -> Any:
            if self.counts[name] == self.limits[name]:
                raise KeyboardInterrupt
            self.counts[name] += 1
            return function(*args)

        return count

    def run(self, output: Path, code: int = 0, rules: str = "weight_only_int4", **limits: int) -> dict[str, int]:
        """Quantize `m.onnx` next to the folder of the output, and return the counts."""
        self.counts, self.limits = {"searched": 0, "written": 0}, {"searched": 99, "written": 99} | limits
        model = output.parent.parent / "m.onnx"
        rules = write_int4_rules(model.parent) if rules == "weight_only_int4" else rules
        run_cli("insert", model, "--rules", rules, "-o", output, "--force", "-q", code=code)
        return self.counts

    @staticmethod
    def files(output: Path) -> dict[str, bytes]:
        """Return the content of all files in the folder of an output."""
        return {file.name: file.read_bytes() for file in output.parent.iterdir()}


def test_interrupted_commands_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command goes on from the written tensors, and writes the same bytes."""
    write_branched_model(tmp_path, external=True)
    runs, whole, output = Interruption(monkeypatch), tmp_path / "whole" / "q.onnx", tmp_path / "out" / "q.onnx"
    full = runs.run(whole)
    assert full["searched"] == 4
    assert full["written"] > 4
    runs.run(output, code=130, searched=2)
    assert not output.exists()
    assert runs.run(output, code=130, written=3) == {"searched": 4, "written": 3}
    assert runs.run(output, code=130, written=1) == {"searched": 4, "written": 1}
    assert runs.run(output) == {"searched": 4, "written": full["written"] - 4}
    assert runs.files(output) == runs.files(whole)


def test_truncated_line_of_the_journal_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the lines before it are kept."""
    write_branched_model(tmp_path, external=True)
    runs, output = Interruption(monkeypatch), tmp_path / "out" / "q.onnx"
    full = runs.run(output)
    runs.run(output, code=130, written=3)
    journal = output.with_name(".q.onnx.resume") / "journal"
    lines = journal.read_text().splitlines()
    assert len(lines) == 3
    journal.write_text("\n".join(lines)[:-5])
    assert runs.run(output)["written"] == full["written"] - 2


@pytest.mark.parametrize("damage", ["weights", "journal", "bytes", "size", "source", "rules"])
def test_stale_parts_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Parts that were damaged, and those of another source or other options, are computed again."""
    model = write_branched_model(tmp_path, external=True)
    runs, whole, output = Interruption(monkeypatch), tmp_path / "whole" / "q.onnx", tmp_path / "out" / "q.onnx"
    runs.run(output, code=130, written=3)
    folder, rules = output.with_name(".q.onnx.resume"), "weight_only_int4"
    if damage == "weights":
        folder.joinpath("weights").write_bytes(b"\0" + folder.joinpath("weights").read_bytes()[1:])
    elif damage == "journal":
        folder.joinpath("journal").write_text("9999999 0")
    elif damage == "bytes":
        folder.joinpath("journal").write_bytes(b"\xff 0\n" + b"9" * 5000 + b" " + b"0" * 64)
    elif damage == "size":  # the lines of a full disk may be joined
        content = folder.joinpath("weights").read_bytes()
        folder.joinpath("journal").write_text(f"{len(content)}0 {hashlib.sha256(content).hexdigest()}\n")
    elif damage == "source":
        values = np.fromfile(model.with_name("m.data"), np.float32)
        (values[::-1] * 2).tofile(model.with_name("m.data"))
    else:
        rules = "weight_only_int8"
    assert runs.run(output, rules=rules) == runs.run(whole, rules=rules)
    assert runs.files(output) == runs.files(whole)


def test_oversized_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too large for a protocol buffer is rejected before it is read, also as another format."""
    monkeypatch.setattr("graphquant.api.models._is_model_of", lambda *_: pytest.fail("the file is read"))
    path = tmp_path / "huge.onnx"
    with path.open("wb") as file:
        file.truncate((1 << 31) + 5)
    with pytest.raises(ModelError, match=r"huge\.onnx .* 2 GB.* external data"):
        gq.load(path)


def test_large_external_weights_are_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size, onnxruntime does not copy the weights, and computes the same."""
    path = write_branched_model(tmp_path, external=True)
    key, sessions = "session.disable_prepacking", []
    for threshold in (session.MEMORY_MAPPED_BYTES, 1):
        monkeypatch.setattr(session, "MEMORY_MAPPED_BYTES", threshold)
        sessions.append(session.create_session(path.read_bytes(), tmp_path, 70_000))
    assert sessions[1].get_session_options().get_session_config_entry(key) == "1"
    with pytest.raises(RuntimeError, match=key):
        sessions[0].get_session_options().get_session_config_entry(key)
    np.testing.assert_allclose(sessions[0].run(None, FEED)[0], sessions[1].run(None, FEED)[0], rtol=1e-4, atol=1e-2)
    monkeypatch.setattr(session, "MEMORY_MAPPED_BYTES", 1)
    np.testing.assert_allclose(
        format_.create_runner(gq.load(path)).run(FEED)["y"], sessions[0].run(None, FEED)[0], rtol=1e-4, atol=1e-2
    )


def test_saving_needs_the_memory_of_one_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing and writing sixteen weights of 4 MB needs the memory of a few."""
    size, count = 1 << 10, 16
    path, nodes, weights = tmp_path / "m.onnx", [], []
    with tmp_path.joinpath("m.data").open("wb") as file:
        for k in range(count):
            np.random.default_rng(k).standard_normal((size, size), np.float32).tofile(file)
            tensor = onnx.TensorProto(name=f"w{k}", data_type=1, dims=[size, size], data_location=1)
            for key, value in (("location", "m.data"), ("offset", k * 4 * size**2), ("length", 4 * size**2)):
                tensor.external_data.add(key=key, value=str(value))
            weights.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"x{k + 1}"]))
    interface = [[helper.make_tensor_value_info(name, 1, [1, size])] for name in ("x0", f"x{count}")]
    graph = helper.make_graph(nodes, "g", *interface, weights)
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    gq.insert(path, rules="weight_only")  # modules are imported
    tracemalloc.start()
    try:
        result = gq.insert(path, rules="weight_only")
        current, loading_peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result.save(tmp_path / "q.onnx")
        saving_peak = tracemalloc.get_traced_memory()[1] - current
    finally:
        tracemalloc.stop()
    assert len(result.inserted) == count
    assert tmp_path.joinpath(*weight_files(tmp_path / "q.onnx")).stat().st_size >= count * size**2
    assert saving_peak < count * size**2  # less than all the integers alone
    assert loading_peak < 2 * count * size**2  # onnxruntime gets the integers, and never the float weights


@pytest.mark.parametrize("shape", [(2 << 10, 4 << 10), (4 << 10, 2 << 10)])
def test_blocks_of_a_weight_need_less_memory_than_the_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    """A weight of 32 MB is read, quantized to 4 bits, packed and written in slabs, with the same bytes as at once."""
    np.random.default_rng(0).standard_normal(shape, np.float32).tofile(tmp_path / "m.data")
    weight = onnx.TensorProto(name="w", data_type=1, dims=shape, data_location=1)
    weight.external_data.add(key="location", value="m.data")
    interface = [[helper.make_tensor_value_info(name, 1, [1, size])] for name, size in zip("xy", shape, strict=True)]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *interface, [weight])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    monkeypatch.setattr(file_writer, "EXTERNALIZE_BYTES", 0)
    result = gq.insert(path, rules="weight_only_int4")
    result.save(tmp_path / "whole.onnx")
    monkeypatch.setattr(affine, "SLAB_ELEMENTS", 1 << 16)
    tracemalloc.start()
    try:
        result.save(tmp_path / "slabs.onnx")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * math.prod(shape)
    names = (weight_files(tmp_path / f"{name}.onnx")[0] for name in ("whole", "slabs"))
    whole, slabs = (tmp_path.joinpath(name).read_bytes() for name in names)
    assert slabs == whole
    nodes = onnx.load(tmp_path / "slabs.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in nodes] == ["MatMulNBits"]


def test_rows_of_a_weight(tmp_path: Path) -> None:
    """Some rows are those of the whole weight. A file that became shorter than them is reported."""
    weight = onnx.TensorProto(name="w", data_type=1, dims=[6, 2, 3], data_location=1)
    for key, value in (("location", "w.data"), ("offset", 8)):
        weight.external_data.add(key=key, value=str(value))
    np.arange(38, dtype=np.float32).tofile(tmp_path / "w.data")
    reader = tensors.initializer_reader(weight, tmp_path)
    assert isinstance(reader, tensors.TensorReader)
    for rows in (slice(0, 2), slice(4, 9), slice(6, 8)):
        np.testing.assert_array_equal(reader.read_rows(rows), reader()[rows])
    os.truncate(tmp_path / "w.data", 100)
    with pytest.raises(ModelError, match="truncated"):
        reader.read_rows(slice(0, 1))


@pytest.mark.parametrize(("code", "dims"), [(1, [6, 2, 3]), (1, []), (1, [0, 3]), (1, [3, 0]), (21, [5, 3])])
def test_slabs_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, dims: list[int]) -> None:
    """Slabs are the rows of the value. A value without rows, or whose elements share bytes, is a single slab."""
    weight = onnx.TensorProto(name="w", data_type=code, dims=dims, data_location=1)
    weight.external_data.add(key="location", value="w.data")
    np.arange(36, dtype=np.float32).tofile(tmp_path / "w.data")
    monkeypatch.setattr(affine, "SLAB_ELEMENTS", 13)
    slabs, value = [*tensors.read_slabs(weight, tmp_path)], tensors.tensor_value(weight, tmp_path)
    assert len(slabs) == (3 if dims == [6, 2, 3] else 0 if dims[:1] == [0] else 1)
    assert b"".join(slab.tobytes() for slab in slabs) == value.tobytes()


@pytest.mark.parametrize(("rules", "has_body"), [("weight_only", False), ("weight_only", True), ("onnxruntime", False)])
def test_loading_copies_no_large_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str, has_body: bool
) -> None:
    """Products with integer weights alone are not fused to see whether a large model loads, unless it has bodies."""
    path, options = tmp_path / "m.onnx", []
    if has_body:
        path = write_branched_model(tmp_path, external=True)
    else:
        weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64), np.float32), "w")
        ends = [[helper.make_tensor_value_info(name, 1, [4, 64])] for name in "xy"]
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *ends, [weight])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    result = gq.insert(path, rules=rules, data=None if rules == "weight_only" else "random:2", validate=False)
    monkeypatch.setattr(external_data, "MAX_READ_BYTES", 0)

    def create_session(*args: Any, mode: session.SessionMode) -> Any:
        options.append(mode.extra_options)
        return create(*args, mode=mode)

    create = session.create_session
    monkeypatch.setattr(session, "create_session", create_session)
    session.require_loadable(result.model)
    disabled = options[0]["optimization.disable_specified_optimizers"]
    assert ("QDQSelectorActionTransformer" in disabled) == (rules == "weight_only" and not has_body)


def test_large_weights_are_not_read_to_load_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size, the sessions that are never run get zeros, and tell the same about each op."""
    result = gq.insert(write_branched_model(tmp_path, external=True), rules="weight_only")
    verdicts = judge_ops(result.model, "onnxruntime")
    for small, limit in (("MAX_READ_BYTES", 0), ("MAX_SMALL_BYTES", 2000)):
        monkeypatch.setattr(external_data, small, limit)
    read, sizes = external_data._deferred_value, []
    monkeypatch.setattr(external_data, "_deferred_value", lambda op: sizes.append(constant_bytes(op)) or read(op))
    session.require_loadable(result.model)
    assert judge_ops(result.model, "onnxruntime") == verdicts
    assert max(sizes, default=0) <= 2000


@pytest.mark.parametrize("unknown", [b"", b"\xf2\x3f\x02hi"])
def test_deferred_weights_are_filled_byte_identically(unknown: bytes, tmp_path: Path) -> None:
    """A message whose weights were deferred and filled in equals the source byte for byte."""
    path = write_branched_model(tmp_path, external=False)
    source = onnx.load(path)
    source.graph.initializer[0].doc_string, source.doc_string = "of a weight", "of the model"
    source.metadata_props.add(key="a", value="b")
    numbers = helper.make_tensor("numbers", 1, [512], np.arange(512, dtype=np.float32))
    source.graph.initializer.append(numbers)
    source.MergeFromString(unknown)
    copy = onnx.ModelProto()
    deferred = external_data.copy_without_weights(source, copy)
    assert [tensor.name for tensor in deferred] == ([] if unknown else ["w", "bias", "numbers"])
    assert copy.ByteSize() < source.ByteSize() - (0 if unknown else 4 * (64 * 64 + 512 + 512)) + 300
    external_data.fill_deferred_weights(copy, deferred)
    assert copy.SerializeToString(deterministic=True) == source.SerializeToString(deterministic=True)


TRUNCATED_WHILE_MAPPED = """
import os, sys
import numpy as np
import graphquant as gq
from graphquant import formats
from graphquant.formats.onnx import session

session.MEMORY_MAPPED_BYTES = 1
runner = formats.format_module("onnx").create_runner(gq.load(sys.argv[1]))
feed = {"x": np.zeros((1, 2048), np.float32)}
runner.run(feed)
os.truncate(sys.argv[2], 0)
if sys.argv[3] == "python":
    sys.modules["graphquant.observers._fill"] = None
gq.compare  # imports the compiled kernel, as each command does
runner.run(feed)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not truncate mapped files")
@pytest.mark.parametrize("kernel", ["compiled", "python"])
def test_weights_that_are_truncated_while_onnxruntime_maps_them(tmp_path: Path, kernel: str) -> None:
    """A process whose mapped weights are truncated ends with a message and the exit code of unreadable models."""
    if kernel == "compiled" and histogram_kernel.count_values is histogram_kernel.count_values_numpy:
        pytest.skip("the kernel was not compiled")
    weight = onnx.TensorProto(name="w", data_type=1, dims=[2048, 2048], data_location=1)
    weight.external_data.add(key="location", value="m.data")
    np.ones((2048, 2048), np.float32).tofile(tmp_path / "m.data")
    infos = [helper.make_tensor_value_info(name, 1, [1, 2048]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", infos[:1], infos[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    arguments = [
        sys.executable,
        "-c",
        TRUNCATED_WHILE_MAPPED,
        *map(str, (tmp_path / "m.onnx", tmp_path / "m.data")),
        kernel,
    ]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr.count("\n"), ended.stderr.startswith("error: ")) == (3, 1, True)
