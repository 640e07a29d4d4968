"""in-toto attestations of outputs."""

import json
from dataclasses import replace

import pytest

from graphquant.batch.attestation import attestation, attestation_path, attested_digests, write_attestation
from graphquant.batch.types import Digests, Entry, Gates, Outcome
from graphquant.errors import UsageError


@pytest.fixture
def entry_and_outcome(tmp_path):
    """Return an entry with one model file and its outcome with two output files."""
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


def test_attestation_content(entry_and_outcome):
    """The attestation lists output files, materials and parameters. It has no gates and no times."""
    entry, outcome = entry_and_outcome
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
                    "range_source": "observed",
                    "include": (),
                    "exclude": (),
                    "float_weights": False,
                    "io": None,
                    "kv_cache": None,
                    "allow_empty": False,
                    "allow_links": False,
                    "requantize": False,
                    "keep_ranges": False,
                    "algorithms": (),
                    "ranges": None,
                    "ranges_map": None,
                    "optimize": "macs",
                    "search_time": "10x",
                    "metric": None,
                    "size_budget": None,
                    "signature": (),
                    "tags": (),
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


def test_model_of_several_files(entry_and_outcome, samples):
    """The digest of a folder is not labelled sha256. Without data there is no data material."""
    entry, outcome = entry_and_outcome
    folder = str(samples / "digits_cnn_saved_model")
    without_data = replace(outcome, digests=replace(outcome.digests, data=""))
    materials = attestation(replace(entry, model=folder, data=None), without_data)["predicate"]["buildDefinition"]
    assert [(material["name"], [*material["digest"]]) for material in materials["resolvedDependencies"]] == [
        ("model", ["graphquantSha256"]),
        ("rules", ["graphquantSha256"]),
    ]


def test_attestation_is_reproducible(entry_and_outcome):
    """The attestation's bytes depend neither on times and attempts nor on the order of the files."""
    entry, outcome = entry_and_outcome
    write_attestation(entry, outcome)
    path = attestation_path(outcome.output)
    expected = path.read_bytes()
    rerun = replace(
        outcome, seconds=9.0, attempts=2, status="unchanged", products=dict(sorted(outcome.products.items()))
    )
    write_attestation(entry, rerun)
    assert path.read_bytes() == expected
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
def test_reading_an_invalid_attestation(tmp_path, text):
    """Reading a file that is not an attestation raises UsageError."""
    path = tmp_path / "x.intoto.json"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"x\.intoto\.json .* in-toto statement"):
        attested_digests(path)


def test_writing_below_a_file(entry_and_outcome, tmp_path):
    """Writing where a file stands in the place of the folder raises UsageError."""
    entry, outcome = entry_and_outcome
    (tmp_path / "nowhere").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_attestation(entry, replace(outcome, output=str(tmp_path / "nowhere" / "net.onnx")))
