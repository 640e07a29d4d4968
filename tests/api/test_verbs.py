"""The Python API: verbs, what they return, what they refuse, and how accurate the quantized sample models are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnx_models import WRONG_PRODUCTS

import graphquant as gq
from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import DataError, EmptyResultError, ModelError, NeedsDataError, RuleError, UsageError
from graphquant.formats.onnx import find_wrong_product
from graphquant.ir import check_invariants

Array = np.ndarray[Any, Any]


@pytest.fixture
def cnn_path(samples: Path) -> Path:
    """The CNN as ONNX."""
    return samples / "digits_cnn.onnx"


@pytest.fixture
def calib(samples: Path) -> str:
    """Its calibration data."""
    return str(samples / "digits_cnn_calib.npz")


def probabilities(model: gq.Model, images: Array) -> Array:
    """The classes' probabilities in the model's own framework, all images in one batch."""
    runner = formats.format_module(model.format).create_runner(model)
    outputs = runner.run({runner.inputs[0].name: images})
    return next(value for value in outputs.values() if value.shape == (len(images), 10))


# -- verbs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["rules", "include", "exclude"])
@pytest.mark.parametrize("value", [None, 3])
def test_invalid_names_are_rejected(cnn_path: Path, argument: str, value: Any) -> None:
    """None or a number in place of names is a usage error that names the option and the value."""
    with pytest.raises(UsageError, match=rf"{argument} is invalid: {value} "):
        gq.plan(cnn_path, **{argument: value})


def test_load_insert_save(cnn_path: Path, calib: str, tmp_path: Path) -> None:
    """Load, insert and save give a model that holds together, runs and has the result's scales."""
    model = gq.load(cnn_path)
    result = gq.insert(model, data=calib)
    assert isinstance(result, gq.Result)
    assert (result.calibration_samples, result.has_random_data, result.source) == (80, False, model)
    assert len(result.inserted) == len(result.plan.sites) - sum(
        1 for skip in result.skips if skip not in result.plan.skips
    )
    assert result.save(tmp_path / "out.onnx") == tmp_path / "out.onnx"
    again = gq.load(tmp_path / "out.onnx")
    check_invariants(again, "the test")
    read = {reading.op: reading.params for reading in summarize_model(again).quantization_ops}
    assert len(read) == len(result.inserted)
    for insertion in result.inserted:
        params = read[insertion.output.op]
        assert params is not None
        np.testing.assert_array_equal(params.scale, insertion.params.scale)
        np.testing.assert_array_equal(params.zero_point, insertion.params.zero_point)


def test_functions_accept_paths_and_models(cnn_path: Path) -> None:
    """A path, its text and a loaded model make the same plan."""
    plans = [gq.plan(source, rules=["weight_only"]) for source in (cnn_path, str(cnn_path), gq.load(cnn_path))]
    assert plans[0] == plans[1] == plans[2]
    assert [site.rule for site in plans[0].sites] == ["weight"] * 9


def test_stats_of_a_result_can_be_reused(cnn_path: Path, calib: str, tmp_path: Path) -> None:
    """Calibrating first, and inserting with the statistics, gives the same file as inserting with the data."""
    plan = gq.plan(cnn_path)
    stats = gq.calibrate(cnn_path, plan, calib)
    assert (stats.samples, stats.model_digest, stats.complete) == (100, plan.model, True)
    assert len(stats.sketches) == len({site.tensor for site in plan.sites if not site.parameter})
    gq.insert(cnn_path, plan=plan, stats=stats).save(tmp_path / "stats.onnx")
    gq.insert(cnn_path, data=calib, validate=False).save(tmp_path / "data.onnx")
    assert (tmp_path / "stats.onnx").read_bytes() == (tmp_path / "data.onnx").read_bytes()


def test_ranges_are_those_of_the_data(cnn_path: Path, calib: str) -> None:
    """Min-max ranges are the smallest and largest value that onnxruntime computes on any sample, with 0 among them."""
    plan = gq.plan(cnn_path, method="minmax")
    stats = gq.calibrate(cnn_path, plan, calib)
    feeds = [{"image": image[None]} for image in np.load(calib)["image"]]
    observed = list(formats.format_module("onnx").create_runner(gq.load(cnn_path)).observe(list(stats.sketches), feeds))
    result = gq.insert(cnn_path, plan=plan, stats=stats)
    scales = {
        insertion.site.tensor: insertion.params.scale for insertion in result.inserted if not insertion.site.parameter
    }
    ties = {tensor for site in plan.sites for use in site.tie for tensor in (site.tensor, _read(result.source, use))}
    for tensor, sketch in stats.sketches.items():
        values = np.concatenate([value.ravel() for run_values in observed for value in run_values[tensor]])
        assert (sketch.low, sketch.high, sketch.count) == (values.min(), values.max(), values.size)
        if tensor not in ties:
            width = max(float(sketch.high), 0) - min(float(sketch.low), 0)
            assert scales[tensor] == pytest.approx(width / 255, rel=1e-6)


def _read(model: gq.Model, use: gq.Use) -> gq.TensorRef | None:
    return model.graphs[use.graph].source_of(use)


def test_progress_is_reported(cnn_path: Path, calib: str) -> None:
    """The callback hears of the start and of each block of samples, in order."""
    calls: list[tuple[str, int, int]] = []
    gq.insert(cnn_path, data=calib, samples=70, progress=lambda *stage_name: calls.append(stage_name))
    completed = [count for stage_name, count, _ in calls if stage_name == "calibrating"]
    assert completed == [*range(0, 56, completed[1]), 56]
    assert [count for stage_name, count, _ in calls if stage_name == "validating"] == [4, 8, 12, 14]
    assert {(stage_name, total) for stage_name, _, total in calls} == {("calibrating", 56), ("validating", 14)}


def test_empty_plan_returns_the_source(cnn_path: Path, tmp_path: Path) -> None:
    """If no rule matches, the saved file is the source, byte for byte."""
    rules = tmp_path / "none.toml"
    rules.write_text('[[rule]]\nname = "r"\nconsumer = { kind = "lstm" }\nquantize = "float"\n')
    result = gq.insert(cnn_path, rules=[str(rules)], allow_empty=True)
    assert (result.inserted, result.model) == ((), result.source)
    result.save(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == cnn_path.read_bytes()


def test_ops_that_preparation_keeps_are_no_reason_for_an_empty_result(samples: Path) -> None:
    """digits_rnn has an Identity that names the output of a loop's body, which has nothing to do with any rule."""
    with pytest.raises(EmptyResultError, match="no rule matches a tensor of it"):
        gq.insert(samples / "digits_rnn.onnx", rules="tables_int4")


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_cnn.pb", "digits_rnn.onnx", "digits_rnn_saved_model"])
def test_the_source_is_not_changed(samples: Path, name: str, tmp_path: Path) -> None:
    """Insert does not change its model, so the model can be used again."""
    model = gq.load(samples / name)
    first = gq.insert(model, rules=["fixed_point"])
    check_invariants(model, "the test")
    gq.save(model, tmp_path / f"source{Path(name).suffix}")
    source = samples / name
    pairs = [(source, tmp_path / f"source{source.suffix}")]
    if source.is_dir():
        pairs = [
            (source / file_name, pairs[0][1] / file_name)
            for file_name in ("saved_model.pb", "variables/variables.index")
        ]
    for before, after in pairs:
        assert after.read_bytes() == before.read_bytes()
    second = gq.insert(model, rules=["fixed_point"])
    assert [str(insertion.site.tensor) for insertion in first.inserted] == [
        str(insertion.site.tensor) for insertion in second.inserted
    ]


def test_quantized_models_stay_unchanged(cnn_path: Path, calib: str) -> None:
    """Quantized tensors are skipped, with the reason."""
    once = gq.insert(cnn_path, data=calib)
    twice = gq.insert(once.model, data=calib)
    before = {reading.op for reading in summarize_model(once.model).quantization_ops}
    added = [reading for reading in summarize_model(twice.model).quantization_ops if reading.op not in before]
    assert [reading.tensor.op for reading in added] == []


# -- errors ----------------------------------------------------------------------------------------


def test_errors_are_of_their_kind(cnn_path: Path, samples: Path, tmp_path: Path) -> None:
    """Each mistake of a caller has its kind."""
    with pytest.raises(ModelError, match=r"no file .*missing\.onnx"):
        gq.load(tmp_path / "missing.onnx")
    with pytest.raises(NeedsDataError, match=r"^\d+ activations.* data"):
        gq.insert(cnn_path)
    with pytest.raises(UsageError, match="Did you mean 'onnxruntime'"):
        gq.plan(cnn_path, rules=["onnxruntim"])
    (tmp_path / "bad.toml").write_text("[scheme.a]\nzerro = 1\n")
    with pytest.raises(RuleError, match=r"bad\.toml:2: .*'zero'"):
        gq.plan(cnn_path, rules=[str(tmp_path / "bad.toml")])
    with pytest.raises(UsageError, match="include='nothing' matches no op"):
        gq.plan(cnn_path, include=["nothing"])
    with pytest.raises(UsageError, match="another model"):
        gq.insert(samples / "digits_rnn.onnx", plan=gq.plan(cnn_path))
    np.savez(tmp_path / "labels.npz", labels=np.zeros(3))
    with pytest.raises(DataError, match=r"labels\.npz"):
        gq.insert(cnn_path, data=str(tmp_path / "labels.npz"))


def test_save_rejects_existing_files(cnn_path: Path, tmp_path: Path) -> None:
    """Without force, no file is replaced; the source is never replaced."""
    result = gq.insert(cnn_path, rules=["weight_only"])
    result.save(tmp_path / "out.onnx")
    with pytest.raises(UsageError, match="exists already"):
        result.save(tmp_path / "out.onnx")
    result.save(tmp_path / "out.onnx", force=True)
    with pytest.raises(UsageError, match=rf"{cnn_path.name} is the source"):
        result.save(cnn_path, force=True)


def test_unknown_public_name() -> None:
    """A name that graphquant does not have is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="quantise"):
        _ = gq.quantise


# -- accuracy --------------------------------------------------------------------------------------


def compared(samples: Path, name: str, tmp_path: Path) -> tuple[float, float, float]:
    """Accuracy of the float model and of the saved int8 one, and the share of images on which they agree."""
    stem = name[:10]
    data = np.load(samples / f"{stem}_eval.npz")
    result = gq.insert(samples / name, data=str(samples / f"{stem}_calib.npz"))
    again = gq.load(result.save(tmp_path / f"out{Path(name).suffix}"))
    before = probabilities(result.source, data["image"]).argmax(1)
    after = probabilities(again, data["image"]).argmax(1)
    labels = data["labels"]
    return float((before == labels).mean()), float((after == labels).mean()), float((before == after).mean())


@pytest.mark.parametrize(
    "name",
    [
        "digits_cnn.onnx",
        "digits_cnn_bn.onnx",
        "digits_rnn.onnx",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "digits_cnn.pb",
                "digits_cnn.pbtxt",
                "digits_cnn_saved_model",
                "digits_rnn.pb",
                "digits_rnn_saved_model",
            )
        ),
    ],
)
def test_int8_is_as_accurate_as_float(samples: Path, tmp_path: Path, name: str) -> None:
    """On 300 test images int8 is within one point of float and agrees with it on 98%."""
    if not name.endswith(".onnx"):
        pytest.importorskip("tensorflow")
    elif name == "digits_rnn.onnx" and find_wrong_product("uint8", "int8", 24):
        pytest.skip(WRONG_PRODUCTS)
    before, after, agreement = compared(samples, name, tmp_path)
    sys.stdout.write(f"{name}: float {before:.4f}, int8 {after:.4f}, agreement {agreement:.4f}\n")
    assert before > 0.98
    assert abs(after - before) <= 0.01
    assert agreement >= 0.98


def test_unneeded_data_must_exist(cnn_path: Path) -> None:
    """A misspelt data file is an error also where the rules need no data."""
    with pytest.raises(DataError, match=r"nope\.npz"):
        gq.insert(cnn_path, rules=["weight_only"], data="nope.npz")


def test_names_as_string_path_text_or_list(samples: Path, cnn_path: Path, tmp_path: Path) -> None:
    """Rules are a name, a path, a text or a list of these; one pattern is a pattern, not its letters."""
    text = (samples.parent / "rules" / "weight_only.toml").read_text("utf-8")
    (tmp_path / "r.toml").write_text(text, "utf-8")
    expected = gq.plan(cnn_path, rules=["weight_only"])
    for rules in ("weight_only", text, [text], tmp_path / "r.toml", [tmp_path / "r.toml"]):
        assert gq.plan(cnn_path, rules=rules).sites == expected.sites
    assert gq.plan(cnn_path, rules=text).rules == (text,)
    patterns = {"exclude": "logits/*", "include": "*"}
    selected = gq.plan(cnn_path, rules="weight_only", **patterns)
    assert 0 < len(selected.sites) < len(expected.sites)
    assert selected == gq.plan(cnn_path, rules=["weight_only"], **{key: [pattern] for key, pattern in patterns.items()})
