"""The plans that shipped rule files make, as text that a review can read."""

import numpy as np
import pytest
from golden_models import CLASSES, TOKENS, WORDS, WRITERS
from support.onnx_models import run_onnx
from support.tensorflow_models import run_graph
from write_golden import CASES, golden_path, model_paths, plan_text

IDS = np.random.default_rng(1).integers(0, WORDS, (3, TOKENS))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return the path of each model by its name."""
    return model_paths(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("rules", "model"), CASES)
def test_plan(rules, model, paths):
    """A rule file plans for a model what its golden file says; write_golden.py writes it anew."""
    assert plan_text(rules, paths[model]) == golden_path(rules, model).read_text("utf-8")


def test_every_golden_file_belongs_to_a_case():
    """No file is left of a rule file or model that does not exist."""
    assert set(golden_path("x", "y").parent.iterdir()) == {golden_path(*case) for case in CASES}


def test_plans_quantize_each_model(paths):
    """Rules for integers quantize products in each model, in bodies too: a golden file of nothing proves nothing."""
    for model, bodies in {"transformer.onnx": False, "transformer.pb": False, "lstm.pb": True}.items():
        text = plan_text("qnn", paths[model])
        assert "by rule" in text, model
        assert ("lstm_body" in text) == bodies


def test_onnx_models_run(paths):
    """ONNX Runtime runs the models, and their finite results depend on the words."""
    for name in (name for name in WRITERS if name.endswith(".onnx")):
        feeds = {"ids": IDS, **({"mask": np.ones_like(IDS)} if name == "transformer.onnx" else {})}
        (result,) = run_onnx(paths[name], feeds)
        assert result.shape[0] == 3
        assert np.isfinite(result).all()
        assert result.std(axis=0).max() > 0.001


@pytest.mark.slow
def test_tensorflow_models_run(paths):
    """TensorFlow runs the frozen graphs: classes with a probability that depends on the words."""
    pytest.importorskip("tensorflow")
    for name in (name for name in WRITERS if name.endswith(".pb")):
        result = run_graph(paths[name], "probabilities:0", {"ids:0": IDS})
        assert result.shape == (3, CLASSES)
        np.testing.assert_allclose(result.sum(-1), 1, rtol=1e-5)
        assert result.std(axis=0).max() > 0.001
