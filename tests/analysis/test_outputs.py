from __future__ import annotations

import numpy as np
import pytest
from support.decoders import Decoder, build_decoder, feeds

import graphquant as gq
from graphquant.analysis.compare import OutputTally
from graphquant.analysis.measured_outputs import match_inputs, match_outputs
from graphquant.errors import UsageError
from graphquant.formats import InputSpec

SCORES = np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)


def any_shape_input(name: str, *aliases: str) -> InputSpec:
    """An input of any shape."""
    return InputSpec(name=name, dtype="float32", shape=None, aliases=aliases)


def test_class_scores() -> None:
    """Rows agree where their largest values are at the same place; labels give accuracy."""
    tally = OutputTally("y", "y", batched=True)
    tally.add(SCORES, SCORES[:, ::-1], np.array([1, 1]))
    tally.add(SCORES, SCORES, np.array([1, 0]))
    figures = tally.figures()
    assert (figures.agreement, figures.rows, figures.accuracy) == (0.5, 4, (0.75, 0.75))


def test_token_scores() -> None:
    """Labels of each token make scores of three axes rows, with a perplexity; probabilities equal their logits."""
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]], np.float32))
    labels = np.array([[0, 1]])
    for scores in (logits, np.exp(logits), logits + 3):
        tally = OutputTally("y", "y", batched=False)
        tally.add(scores, np.flip(scores, -1), labels)
        tally.add(scores[:, :1], scores[:, :1], labels[:, :1])
        figures = tally.figures()
        assert (figures.agreement, figures.rows, figures.accuracy) == (1 / 3, 3, (2 / 3, 1 / 3))
        expected = [(0.5 * 0.2 * 0.5) ** (-1 / 3), (0.25 * 0.2 * 0.5) ** (-1 / 3)]
        assert figures.perplexity == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_scores_of_the_vocabulary_have_an_agreement(architecture: str) -> None:
    """Without labels, scores of as many tokens as the embedding has count each row; positions and features do not."""
    decoder = Decoder(architecture=architecture, ops="standard", past=False, hidden=64)
    model = build_decoder(decoder)
    ids = np.random.default_rng(0).integers(0, decoder.vocabulary, (6, 10))
    comparison = gq.compare(model, model, feeds(decoder, ids), sites=False)
    assert [(output.rows, output.agreement) for output in comparison.outputs] == [(60, 1.0)]
    tally = OutputTally("y", "y", batched=True, vocabulary=decoder.vocabulary)
    tally.add(np.ones((2, 3, 64)), np.ones((2, 3, 64)), None)
    assert tally.figures().agreement is None


def test_three_axes_without_token_labels() -> None:
    """Without labels of each row, or with other integers, an output of three axes has no perplexity."""
    values = np.ones((1, 2, 3), np.float32)
    for labels, rows in ((None, 0), (np.array([1]), 0), (np.array([1, 5]), 2)):
        tally = OutputTally("y", "y", batched=True)
        tally.add(values, values, labels)
        figures = tally.figures()
        assert (figures.rows, figures.perplexity) == (rows, None)


def test_vectors() -> None:
    """A vector is a row of scores, unless its axis counts samples."""
    for batched, rows in ((False, 1), (True, 0)):
        tally = OutputTally("y", "y", batched=batched)
        tally.add(SCORES[0], SCORES[0], None)
        assert tally.figures().rows == rows


def test_integers() -> None:
    """Integers agree one by one and have no SQNR."""
    tally = OutputTally("y", "y", batched=True)
    tally.add(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 9]), None)
    figures = tally.figures()
    assert (figures.agreement, figures.sqnr, figures.max_error) == (0.75, None, 5)


def test_texts() -> None:
    """Texts agree one by one and have no SQNR."""
    for kind in (object, np.str_, np.bytes_):
        tally = OutputTally("y", "y", batched=True)
        tally.add(np.array(["a", "b"], kind), np.array(["a", "c"], kind), None)
        figures = tally.figures()
        assert (figures.agreement, figures.sqnr, figures.problem) == (0.5, None, "")


def test_problems() -> None:
    """Outputs of one model only and different shapes are problems and have no metrics."""
    for expected, actual, problem in (
        (SCORES, None, "only the float model gives it for some sample"),
        (None, SCORES, "only the quantized model gives it for some sample"),
        (np.array(["a"], object), np.array(["a", "b"], object), "shapes differ: [1] and [2]"),
        (SCORES, SCORES[:1], "shapes differ: [2, 2] and [1, 2]"),
        (SCORES, np.full_like(SCORES, np.nan), "4 values are NaN or infinite"),
    ):
        tally = OutputTally("y", "y", batched=True)
        tally.add(expected, actual, None)
        tally.add(SCORES, SCORES, None)
        assert tally.figures().problem == problem


def test_outputs_are_matched() -> None:
    """As given, by name, and the rest in order."""
    assert match_outputs(["a", "b"], ["b", "a"], {}) == {"a": "a", "b": "b"}
    assert match_outputs(["a", "x"], ["y", "a"], {}) == {"a": "a", "x": "y"}
    assert match_outputs(["a", "b"], ["c", "d"], {"a": "d"}) == {"a": "d"}
    with pytest.raises(UsageError, match="--match"):
        match_outputs(["a", "b"], ["a"], {})
    with pytest.raises(UsageError, match=r"'boxs'.*'boxes'"):
        match_outputs(["a"], ["boxes"], {"a": "boxs"})


def test_inputs_are_matched() -> None:
    """By name or another name, else in order."""
    assert match_inputs(
        [any_shape_input("x"), any_shape_input("y")], [any_shape_input("serve_y", "y"), any_shape_input("x")]
    ) == {"serve_y": "y", "x": "x"}
    assert match_inputs([any_shape_input("x")], [any_shape_input("other")]) == {"other": "x"}
    with pytest.raises(UsageError, match=r"'x', and 'a', 'b'"):
        match_inputs([any_shape_input("x")], [any_shape_input("a"), any_shape_input("b")])
