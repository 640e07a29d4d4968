"""in-toto statements on outputs."""

import json
from dataclasses import replace

import pytest

from graphquant.batch.attestation import attestation, attestation_path, attested_digests, write_attestation
from graphquant.batch.types import Digests, Entry, Gates, Outcome
from graphquant.errors import UsageError


@pytest.fixture
def made(tmp_path):
    """An entry and what became of it: a model of one file, an output of two."""
    model = tmp_path / "net.onnx"
    model.write_bytes(b"model")
    output = str(tmp_path / "net.quant.onnx")
    entry = Entry(
        name="net",
        model=str(model),
        output=output,
        rules=("mine.toml", "onnxruntime"),
        data="images,preset=imagenet",
        samples=8,
        gates=Gates(min_sqnr=30.0),
    )
    outcome = Outcome(
        name="net",
        model=str(model),
        output=output,
        status="done",
        digests=Digests(model="a" * 64, rules="b" * 64, data="c" * 64, output="d" * 64, key="e" * 64),
        products={"net.quant.onnx.data": "2" * 64, "net.quant.onnx": "1" * 64},
        versions={"graphquant": "0.1.0"},
        seconds=3.0,
    )
    return entry, outcome


def test_an_attestation(made):
    """It has every file of the output, what that was made of, and with which parameters; no bounds, no times."""
    entry, outcome = made
    assert attestation(entry, outcome) == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": "net.quant.onnx", "digest": {"sha256": "1" * 64}},
            {"name": "net.quant.onnx.data", "digest": {"sha256": "2" * 64}},
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:graphquant:insert:1",
                "externalParameters": {
                    "rules": ("mine.toml", "onnxruntime"),
                    "data": "images,preset=imagenet",
                    "stats": None,
                    "samples": 8,
                    "method": None,
                    "family": None,
                    "include": (),
                    "exclude": (),
                    "float_weights": False,
                    "requantize": False,
                    "algorithms": (),
                    "ranges": None,
                    "ranges_map": None,
                    "optimize": "macs",
                    "size_budget": None,
                },
                "internalParameters": {"key": "e" * 64},
                "resolvedDependencies": [
                    {"name": "model", "digest": {"sha256": "a" * 64}, "annotations": {"path": entry.model}},
                    {
                        "name": "rules",
                        "digest": {"graphquantSha256": "b" * 64},
                        "annotations": {"path": "mine.toml, onnxruntime"},
                    },
                    {
                        "name": "data",
                        "digest": {"graphquantSha256": "c" * 64},
                        "annotations": {"path": "images,preset=imagenet"},
                    },
                ],
            },
            "runDetails": {"builder": {"id": "urn:graphquant:batch", "version": {"graphquant": "0.1.0"}}},
        },
    }


def test_a_model_of_several_files(made, samples):
    """The digest over them is no file's SHA-256, and does not say it is; without data there is no such material."""
    entry, outcome = made
    folder = str(samples / "digits_cnn_saved_model")
    bare = replace(outcome, digests=replace(outcome.digests, data=""))
    materials = attestation(replace(entry, model=folder, data=None), bare)["predicate"]["buildDefinition"]
    assert [(one["name"], [*one["digest"]]) for one in materials["resolvedDependencies"]] == [
        ("model", ["graphquantSha256"]),
        ("rules", ["graphquantSha256"]),
    ]


def test_attestations_repeat(made):
    """Whatever the time, the tries, or the order of the files."""
    entry, outcome = made
    write_attestation(entry, outcome)
    path = attestation_path(outcome.output)
    first = path.read_bytes()
    other = replace(
        outcome, seconds=9.0, attempts=2, status="unchanged", products=dict(sorted(outcome.products.items()))
    )
    write_attestation(entry, other)
    assert path.read_bytes() == first
    assert attested_digests(path) == outcome.products


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"_type": "https://in-toto.io/Statement/v1"}),
        json.dumps({"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "a"}]}),
        json.dumps({"_type": "https://in-toto.io/Statement/v1", "subject": {"name": "a"}}),
        json.dumps({"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "a", "digest": {"sha256": 1}}]}),
        json.dumps({"_type": "another", "subject": [{"name": "a", "digest": {"sha256": "1"}}]}),
    ],
)
def test_files_that_are_not_attestations(tmp_path, text):
    """It is refused in words."""
    path = tmp_path / "x.intoto.json"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match="is not an in-toto statement on files"):
        attested_digests(path)


def test_an_attestation_that_cannot_be_written(made, tmp_path):
    """It is refused in words."""
    entry, outcome = made
    with pytest.raises(UsageError, match="cannot be written"):
        write_attestation(entry, replace(outcome, output=str(tmp_path / "nowhere" / "net.onnx")))
