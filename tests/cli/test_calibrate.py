"""Statistics files on the command line: calibrate, its shards and merging, Ctrl-C, and insert --stats."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import graphquant as gq
from graphquant.calibration.stats import load_stats

if TYPE_CHECKING:
    from collections.abc import Callable

CNN = ("digits_cnn.onnx", "--data", "digits_cnn_calib.npz")


@pytest.fixture
def calibration_folder(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with the sample models and their data in it, the current one."""
    for name in ("digits_cnn.onnx", "digits_cnn_bn.onnx", "digits_rnn.onnx", "digits_cnn.pb"):
        shutil.copy(samples / name, tmp_path / name)
    for name in ("digits_cnn_calib.npz", "digits_rnn_calib.npz"):
        shutil.copy(samples / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_calibrate_then_insert(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """Inserting with a statistics file writes the bytes that inserting with the data does, and names the file."""
    result = cli("calibrate", *CNN, "-o", "stats.gqs")
    stats = load_stats(Path("stats.gqs"))
    assert (len(stats.targets), stats.samples, stats.complete) == (13, 100, True)
    assert result.stderr == ""
    result = cli("insert", "digits_cnn.onnx", "--stats", "stats.gqs", "-o", "stats.onnx", "--report", "report.json")
    assert "stats.gqs" in result.stdout
    cli("insert", *CNN, "--no-validate", "-o", "data.onnx")
    assert Path("stats.onnx").read_bytes() == Path("data.onnx").read_bytes()
    report = json.loads(Path("report.json").read_text())
    data = report["data"]
    assert (data["samples"], data["random"], data["complete"], data["stats"]) == (100, False, True, "stats.gqs")
    assert (data["blocks"], data["digests"]) == (
        load_stats(Path("stats.gqs")).blocks,
        [load_stats(Path("stats.gqs")).runs[0].data_digest],
    )
    planned = {site.scheme.observe.name for site in gq.plan("digits_cnn.onnx").sites}
    assert {site["method"] for site in report["sites"]} == planned


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_cnn", "digits_rnn"])
def test_merged_shards_equal_one_calibration(cli: Callable[..., Any], calibration_folder: Path, name: str) -> None:
    """2 and 8 shards, merged in any order, are the file of one call."""
    model = (f"{name}.onnx", "--data", f"{name}_calib.npz")
    cli("calibrate", *model, "-o", "one.gqs")
    for count in (2, 8):
        shards = [f"{count}_{index}.gqs" for index in range(1, count + 1)]
        for index, shard in enumerate(shards, 1):
            result = cli("calibrate", *model, "--shard", f"{index}/{count}", "-o", shard)
            assert "calibrate --merge" in result.stdout
        result = cli("calibrate", "--merge", *shards[1:], shards[0], "-o", "merged.gqs", "--force")
        assert "--merge" not in result.stdout
        assert Path("merged.gqs").read_bytes() == Path("one.gqs").read_bytes()
    result = cli("calibrate", "--merge", "2_1.gqs", "one.gqs", "-o", "twice.gqs", code=2)
    assert result.stderr.startswith("error: one.gqs ")
    cli("insert", f"{name}.onnx", "--stats", "2_2.gqs", "--dry-run")


def test_shard_without_a_block(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """A shard without a block reports the number of blocks, can be merged, and is rejected by insert."""
    result = cli("calibrate", *CNN, "--shard", "1/8", "-o", "1.gqs")
    assert "4 blocks of 32 samples" in result.stdout
    result = cli("insert", "digits_cnn.onnx", "--stats", "1.gqs", "--dry-run", code=2)
    assert "calibrate --merge" in result.stderr
    cli("calibrate", *CNN, "--shard", "2/8", "-o", "2.gqs")
    cli("calibrate", "--merge", "1.gqs", "2.gqs", "-o", "both.gqs")
    cli("insert", "digits_cnn.onnx", "--stats", "both.gqs", "--dry-run")


@pytest.mark.parametrize("name", [pytest.param("digits_cnn", marks=pytest.mark.slow), "digits_rnn"])
def test_memory_limit_keeps_statistics_equal(cli: Callable[..., Any], calibration_folder: Path, name: str) -> None:
    """Observed in many passes, tensors have the same statistics, bit for bit."""
    model = (f"{name}.onnx", "--data", f"{name}_calib.npz", "--samples", 8)
    for size in ("1GB", "80KB", "1"):
        cli("calibrate", *model, "-o", f"{name}{size}.gqs", "--max-memory", size, "--all")
    files = {Path(f"{name}{size}.gqs").read_bytes() for size in ("1GB", "80KB", "1")}
    assert len(files) == 1
    cli("insert", *model, "--max-memory", "1", "-o", "small.onnx", "--force")
    cli("insert", *model, "-o", "large.onnx", "--force")
    assert Path("small.onnx").read_bytes() == Path("large.onnx").read_bytes()


@pytest.mark.parametrize("size", ["lots", "0", "-1MB", "5 parsecs", "1e3"])
def test_invalid_sizes(cli: Callable[..., Any], calibration_folder: Path, size: str) -> None:
    """A size that cannot be read is an error that shows how."""
    result = cli("calibrate", *CNN, "-o", "stats.gqs", f"--max-memory={size}", code=2)
    assert "Invalid value for '--max-memory'" in result.stderr
    assert repr(size) in result.stderr


@pytest.mark.parametrize("name", [pytest.param("digits_cnn", marks=pytest.mark.slow), "digits_cnn_bn"])
def test_all_serves_any_rules(cli: Callable[..., Any], calibration_folder: Path, name: str) -> None:
    """One pass over everything serves rule files that prepare the model differently."""
    cli("calibrate", f"{name}.onnx", "--data", "digits_cnn_calib.npz", "--all", "-o", f"{name}.gqs")
    for rules in ("onnxruntime", "tflite", "tensorrt"):
        options = [
            "--rules",
            rules,
            "--method",
            "minmax",
            "--no-validate",
            "--force",
            "--report",
        ]  # auto picks among steps
        cli("insert", f"{name}.onnx", "--stats", f"{name}.gqs", *options, "stats.json")
        cli("insert", f"{name}.onnx", "--data", "digits_cnn_calib.npz", *options, "data.json")
        stats_sites, data_sites = (
            json.loads(Path(f"{source}.json").read_text())["sites"] for source in ("stats", "data")
        )
        assert [site["tensor"] for site in stats_sites] == [site["tensor"] for site in data_sites]
        for site, data_site in zip(stats_sites, data_sites, strict=True):
            np.testing.assert_allclose(site["scale"], data_site["scale"], rtol=1e-4)


def test_statistics_that_do_not_serve(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """Another model, another preparation, other rules: the reason, the tensors and the command that helps."""
    cli("calibrate", *CNN, "-o", "stats.gqs")
    result = cli("insert", "digits_cnn_bn.onnx", "--stats", "stats.gqs", code=2)
    command = "  graphquant calibrate digits_cnn_bn.onnx --data SPEC --rules onnxruntime -o stats.gqs"
    assert result.stderr.splitlines()[-1] == command
    result = cli("insert", "digits_cnn.onnx", "--stats", "stats.gqs", "--rules", "tflite", code=2)
    line = result.stderr.splitlines()[-1]
    words = shlex.split(line.replace("SPEC", "digits_cnn_calib.npz"))
    cli(*words[1:], "--force")
    cli("insert", "digits_cnn.onnx", "--stats", "stats.gqs", "--rules", "tflite")


def test_changed_weights_are_noticed(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """External data is no part of the model file's digest, and still the statistics know it."""
    message = onnx.load("digits_cnn.onnx")
    onnx.save(message, "outside.onnx", save_as_external_data=True, location="weights.bin", size_threshold=1024)
    cli("calibrate", "outside.onnx", "--data", "digits_cnn_calib.npz", "-o", "stats.gqs")
    cli("insert", "outside.onnx", "--stats", "stats.gqs", "--dry-run")
    weights = np.fromfile("weights.bin", np.uint8)
    conv = next(node for node in message.graph.node if node.name == "residual_2/conv")
    value = numpy_helper.to_array(
        next(initializer for initializer in message.graph.initializer if initializer.name == conv.input[1])
    )
    offset = weights.tobytes().find(value.tobytes())
    weights[offset : offset + 4] = np.frombuffer(np.float32(1.25).tobytes(), np.uint8)
    weights.tofile("weights.bin")
    result = cli("insert", "outside.onnx", "--stats", "stats.gqs", code=2)
    assert "residual/add:0" in result.stderr or "residual_2" in result.stderr
    assert "stem/relu" not in result.stderr


def test_statistics_of_several_data_sets(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """Statistics of two data sets are merged and counted; random data is marked wherever it is used."""
    cli("calibrate", *CNN, "-o", "one.gqs")
    result = cli("calibrate", "digits_cnn.onnx", "--data", "random:10", "-o", "two.gqs")
    assert "RANDOM" in result.stdout
    result = cli("calibrate", "--merge", "one.gqs", "two.gqs", "-o", "both.gqs")
    assert (load_stats(Path("both.gqs")).samples, len(load_stats(Path("both.gqs")).runs)) == (110, 2)
    result = cli("insert", "digits_cnn.onnx", "--stats", "both.gqs", "--dry-run")
    assert "RANDOM" in result.stdout
    cli("calibrate", "digits_rnn.onnx", "--data", "digits_rnn_calib.npz", "-o", "rnn.gqs")
    result = cli("calibrate", "--merge", "one.gqs", "rnn.gqs", "-o", "none.gqs", code=2)
    assert result.stderr.startswith("error: rnn.gqs ")
    assert not Path("none.gqs").exists()


def test_methods(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """--method is the observer of all activations, from the same statistics; an unknown one names its neighbour."""
    cli("calibrate", *CNN, "-o", "stats.gqs")
    for method in ("minmax", "absmax"):
        cli("insert", "digits_cnn.onnx", "--stats", "stats.gqs", "--method", method, "--dry-run", "--report", method)
    sites = [json.loads(Path(method).read_text())["sites"] for method in ("minmax", "absmax")]
    joined = [
        next(site for site in method_sites if site["tensor"]["op"] == "residual_2/conv") for method_sites in sites
    ]
    assert [site["method"] for site in joined] == ["minmax", "absmax"]
    assert joined[0]["low"] != -joined[0]["high"]
    assert joined[1]["low"] == pytest.approx(-joined[1]["high"], rel=0.02)  # a step of the 255 apart
    result = cli("insert", "digits_cnn.onnx", "--stats", "stats.gqs", "--method", "minmix", code=2)
    assert "'minmix'" in result.stderr
    assert "Did you mean 'minmax'" in result.stderr


def test_usage(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """Missing and contradicting options are reported."""
    for arguments, message in (
        (["calibrate", "digits_cnn.onnx", "-o", "s.gqs"], "no calibration data"),
        (["calibrate", *CNN, "--shard", "9/8", "-o", "s.gqs"], "--shard 9/8"),
        (["calibrate", *CNN, "--shard", "half", "-o", "s.gqs"], "--shard half"),
        (["calibrate", *CNN, "b.onnx", "-o", "s.gqs"], "b.onnx"),
        (["calibrate", "--merge", "a.gqs", "-o", "s.gqs"], "--merge needs two or more"),
        (["calibrate", "--merge", "a.gqs", "b.gqs", "--all", "-o", "s.gqs"], "--merge needs two or more"),
        (["calibrate", "--merge", "a.gqs", "b.gqs", "-o", "s.gqs"], "a.gqs"),
        (["insert", "digits_cnn.onnx", "--samples", "3"], "--samples"),
        (["insert", "digits_cnn.onnx", "--strict"], "--strict"),
        (["insert", *CNN, "--no-validate", "--min-sqnr", "3"], "--no-validate"),
        (["insert", "digits_cnn.onnx", "--stats", "s.gqs"], "s.gqs"),
        (["insert", "digits_cnn.onnx", "--stats", "digits_cnn.onnx"], "digits_cnn.onnx"),
        (["calibrate", *CNN, "-o", "digits_cnn.onnx"], "digits_cnn.onnx is the source model"),
        (["calibrate", *CNN, "-o", "digits_cnn.pb"], "digits_cnn.pb exists already"),
        (["calibrate", *CNN, "-o", "stats.txt"], "stats.txt"),
        (["calibrate", *CNN, "-o", "digits_cnn.pb/s.gqs"], "digits_cnn.pb is a file"),
    ):
        assert message in cli(*arguments, code=2).stderr
    assert not Path("s.gqs").exists()


def test_existing_statistics_are_kept_without_force(cli: Callable[..., Any], calibration_folder: Path) -> None:
    """Complete statistics, and those of other data, are not replaced without --force."""
    cli("calibrate", *CNN, "-o", "stats.gqs")
    before = Path("stats.gqs").read_bytes()
    for more in ([], ["--samples", 50], ["--all"]):
        result = cli("calibrate", *CNN, *more, "-o", "stats.gqs", code=2)
        assert "stats.gqs" in result.stderr
        assert "--force" in result.stderr
        assert Path("stats.gqs").read_bytes() == before
    cli("calibrate", *CNN, "--samples", 50, "-o", "stats.gqs", "--force")
    assert load_stats(Path("stats.gqs")).samples == 50


INTERRUPTING = """
import signal, sys, threading, time
from graphquant.calibration.calibrate import _SketchCollector
from graphquant.cli import main
blocks, times = int(sys.argv.pop(1)), int(sys.argv.pop(1))
collect, signals, closed = _SketchCollector.collect, [], []
def interrupted(collector, pool, observation, block):
    while len(closed) == blocks and len(signals) < times:
        signals.append(None)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        # The main thread handles the signal when it wakes up.
        while collector._should_stop is not None and not collector._should_stop():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.001)
    collect(collector, pool, observation, block)
    closed.extend([] if block is None else [block])
_SketchCollector.collect = interrupted
signal.signal(signal.SIGUSR1, lambda *_: None)
main()
"""


def interrupted(blocks: int, *arguments: object, times: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs graphquant, which gets SIGINT before its block of that number."""
    command = [sys.executable, "-c", INTERRUPTING, str(blocks), str(times), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(gq.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--force"], ["--all", "--shard", "1/2"]])
def test_interrupted_keeps_and_goes_on(cli: Callable[..., Any], calibration_folder: Path, more: list[str]) -> None:
    """Ctrl-C stops after the block, and the printed command leads to the bytes of an uninterrupted run."""
    command = ["calibrate", "digits_rnn.onnx", "--data", "digits_rnn_calib.npz", *more]
    cli(*command, "-o", "whole.gqs")
    result = interrupted(1, *command, "-o", "my stats.gqs")
    assert result.returncode == 130
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("Stopping ")
    assert lines[1].startswith("Interrupted.")
    partial_stats = load_stats(Path("my stats.gqs"))
    assert (partial_stats.blocks, partial_stats.complete) == (2, False)
    output = cli("insert", "digits_rnn.onnx", "--stats", "my stats.gqs", "--dry-run").stdout
    assert f"{partial_stats.samples} of {partial_stats.runs[0].samples} samples" in output
    words = shlex.split(lines[2])
    assert words[0] == "graphquant"
    assert "--force" not in words
    again = interrupted(0, *words[1:])
    assert (again.returncode, load_stats(Path("my stats.gqs")).blocks) == (130, 3)
    assert shlex.split(again.stderr.splitlines()[2]) == words
    cli(*words[1:])
    assert Path("my stats.gqs").read_bytes() == Path("whole.gqs").read_bytes()


@pytest.mark.slow
def test_interrupted_twice_stops_at_once(calibration_folder: Path) -> None:
    """The second Ctrl-C stops immediately, and no file is written."""
    result = interrupted(1, "calibrate", *CNN, "-o", "stats.gqs", times=2)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (130, "Interrupted.")
    assert not Path("stats.gqs").exists()


COUNTING = """
import os, signal
import numpy as np
def feeds():
    for number in range(1000):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if number == 10:
            raise SystemExit("it went on")
        yield {"image": np.zeros((1, 8, 8, 1), np.float32)}
"""


@pytest.mark.slow
def test_interrupted_while_samples_are_counted(calibration_folder: Path) -> None:
    """The first Ctrl-C stops immediately if no block has run."""
    Path("counting.py").write_text(COUNTING, "utf-8")
    result = interrupted(0, "calibrate", "digits_cnn.onnx", "--data", "counting:feeds", "-o", "stats.gqs", times=0)
    assert (result.returncode, result.stderr) == (130, "Interrupted.\n")
    assert not Path("stats.gqs").exists()


@pytest.mark.slow
def test_interrupted_in_the_last_block_is_done(calibration_folder: Path) -> None:
    """An interrupt during the last block has no effect."""
    result = interrupted(0, "calibrate", *CNN, "--samples", 4, "-o", "stats.gqs")
    assert (result.returncode, load_stats(Path("stats.gqs")).complete) == (0, True)


@pytest.mark.slow
def test_interrupted_insert_writes_nothing(calibration_folder: Path) -> None:
    """An interrupted insert keeps no file."""
    result = interrupted(1, "insert", *CNN, "-o", "out.onnx")
    assert (result.returncode, result.stderr) == (130, "Interrupted.\n")
    assert not Path("out.onnx").exists()


MANY = """
import pathlib
import time

import numpy as np

passes = []

def samples():
    images = np.load("digits_cnn_calib.npz")["image"]
    passes.append(len(passes))
    for number in range(2_000):
        if passes[-1] and number == 500:
            pathlib.Path("begun").touch()
        if passes[-1] and number >= 500:
            time.sleep(0.05)
        yield {"image": images[number % len(images)][None]}
"""
"""Data that tells when a part of it was read, after the pass that counts it, and goes on for long."""


@pytest.mark.slow
def test_killed_by_a_real_signal(calibration_folder: Path) -> None:
    """SIGINT from outside ends with 130 and a file that is whole."""
    Path("many.py").write_text(MANY)
    command = [sys.executable, "-m", "graphquant", "calibrate", "digits_cnn.onnx", "--data", "many:samples"]
    with subprocess.Popen([*command, "-o", "s.gqs"], stderr=subprocess.PIPE, text=True) as process:
        while not Path("begun").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=300)
    assert process.returncode == 130, message
    assert "Interrupted." in message
    assert 0 < load_stats(Path("s.gqs")).samples < 2_000


@pytest.mark.slow
def test_tensorflow(cli: Callable[..., Any], samples: Path, calibration_folder: Path) -> None:
    """The same for TensorFlow models: shards, little memory, all tensors for other rules, SavedModels."""
    for name, data in (("digits_rnn.pb", "digits_rnn_calib.npz"), ("digits_cnn_saved_model", "digits_cnn_calib.npz")):
        model = (samples / name, "--data", data, "--samples", 20)
        cli("calibrate", *model, "-o", f"{name}.gqs")
        shards = [f"{name}{index}.gqs" for index in (1, 2)]
        for index, shard in enumerate(shards, 1):
            cli("calibrate", *model, "--shard", f"{index}/2", "-o", shard)
        cli("calibrate", "--merge", *shards, "-o", "merged.gqs", "--force")
        cli("calibrate", *model, "-o", "small.gqs", "--force", "--max-memory", "20KB")
        files = [Path(file).read_bytes() for file in (f"{name}.gqs", "merged.gqs", "small.gqs")]
        assert files[0] == files[1] == files[2]
        cli("insert", samples / name, "--stats", f"{name}.gqs", "--dry-run")
        cli("calibrate", *model, "--all", "-o", "all.gqs", "--force")
        for rules in ("tflite", "onnxruntime", "tensorrt"):
            result = cli("insert", samples / name, "--stats", "all.gqs", "--rules", rules, "--dry-run")
            assert "ranges from 20 samples" in result.output
