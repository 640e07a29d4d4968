"""Data specs (`PATH,key=value,...`, a `.toml` file with the same keys, `module:function`, or `random:N`) and datasets.

A spec may also be data in memory. A dataset has one feed per sample.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from graphquant.calibration.data.files import DataFile, is_remote, list_data_files, wrap_read_errors
from graphquant.errors import DataError, UsageError, did_you_mean
from graphquant.numerics import Array

if TYPE_CHECKING:
    from graphquant.formats import InputSpec

Feed = dict[str, Array]

LABEL_KEYS = frozenset({"label", "labels", "target", "targets", "y", "class", "position 1"})
"""Keys that no input is expected to take."""

RANDOM_PREFIX = "random:"
MIN_SPLIT_SAMPLES = 8  # number of samples below which those that determine the ranges also judge the result
SAMPLE_SPANS = 8  # number of ranges of the data from which samples are taken
MAX_TOML_BYTES = 1 << 20

PIXEL_KEYS = ("preset", "size", "resize", "crop_pct", "filter", "fill", "layout", "order", "scale", "mean", "std")
"""Keys that configure the conversion of images to numbers."""


class DataKind(NamedTuple):
    """A kind of data, opened by the function `opener`, "module:function".

    `file_pattern` is a regular expression for file names; empty if files do not identify the kind. Samples with fields
    have names, so that `inputs.NAME=FIELD` can assign them to inputs.
    """

    description: str
    opener: str
    file_pattern: str = ""
    keys: tuple[str, ...] = ()
    has_fields: bool = False


DATA_KINDS = {
    "npz": DataKind(
        "arrays named after the inputs, from numpy.savez",
        "arrays:open_arrays",
        r".*\.npz",
        ("max_size", *PIXEL_KEYS),
        has_fields=True,
    ),
    "npy": DataKind(
        "one array, from numpy.save, for models with one input", "arrays:open_arrays", r".*\.npy", PIXEL_KEYS
    ),
    "onnx-test-set": DataKind(
        "folders with input_0.pb, input_1.pb, ...; each folder is one run of the model",
        "records:open_onnx_sets",
        r"input_\d+\.pb",
    ),
    "images": DataKind(
        "one image per sample, for models with one input",
        "images:open_images",
        r".*\.(jpe?g|png|bmp|gif|webp|tiff?|ppm|pgm)",
        PIXEL_KEYS,
    ),
    "audio": DataKind(
        "one wav file per sample, for models with one input",
        "audio:open_audio",
        r".*\.wav",
        ("rate", "length", "pad", "scale"),
    ),
    "tfrecord": DataKind(
        "records of tf.train.Example, one per sample",
        "records:open_tfrecord",
        r".*\.tfrec(ord)?s?(-\d+-of-\d+)?(\.gz)?",
        PIXEL_KEYS,
        has_fields=True,
    ),
    "parquet": DataKind(
        "tables whose columns are inputs, one row per sample",
        "records:open_parquet",
        r".*\.(parquet|pq)",
        PIXEL_KEYS,
        has_fields=True,
    ),
    "function": DataKind(
        "module:function, Python code that returns any iterable; the code is executed",
        "function:open_function",
        has_fields=True,
    ),
    "random": DataKind("random:N, N random samples for tests", "function:open_random"),
}

_INLINE_SPEC = re.compile(r"(?P<path>.*?)(?P<keys>(,[a-z_]+(\.[^,=]+)?=[^,]*)*)", re.DOTALL)
_FUNCTION_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class MemoryData:
    """Calibration data in memory: arrays, or an iterable of items like those of `module:function`.

    A dict, a tuple or an array is one item with all samples. Loaders, readers and generators are read once, and their
    items stay in memory: the next pass may return other samples, or none.
    """

    def __init__(self, value: Any) -> None:
        """Prepare `value`, of which nothing is read yet."""
        self._lock = Lock()
        self._value, self._rest = value, iter(())
        self.keeps_items = False  # True if items stay in memory that the caller may not keep
        self._items: list[Any] = []
        if isinstance(value, Mapping | tuple) or hasattr(value, "__array__"):
            self._items = [value]
        elif isinstance(value, list):
            self._items = value
        else:
            self.keeps_items = True

    @property
    def by_signature(self) -> Mapping[str, str | MemoryData]:
        """The data of each signature, if it is a dict of data specs or dicts; {} for data of all signatures."""
        value = self._items[0] if len(self._items) == 1 else None
        if not isinstance(value, Mapping) or not value:
            return {}
        if not all(isinstance(part, str | Path | Mapping) for part in value.values()):
            return {}
        return {str(name): as_data_spec(part) for name, part in value.items()}

    def __str__(self) -> str:
        return "data"

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count():
            with self._lock:  # several threads may read samples
                if index == 0 and self.keeps_items and self._value is not None:
                    get_next = getattr(self._value, "get_next", None)  # of an ONNX Runtime CalibrationDataReader
                    self._rest = iter(self._value) if get_next is None else iter(get_next, None)
                    self._value = None
                if index == len(self._items):
                    self._items.extend(itertools.islice(self._rest, 1))
                if index >= len(self._items):
                    return
                item = self._items[index]
            yield item


def as_data_spec(value: Any) -> str | MemoryData:
    """Return data in the form that `open_data` accepts. Raises a UsageError if `value` is neither a spec nor data."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, MemoryData):
        return value
    # Integers from 0 to 255 are no samples, and the keys of a set have no order.
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset | type):
        is_data = False
    else:
        is_data = any(hasattr(value, name) for name in ("__iter__", "__getitem__", "__array__", "get_next"))
    if not is_data:
        raise UsageError(
            f"The value of data is invalid: it is of the type {type(value).__name__}. Pass a data spec such as"
            " 'calibration.npz', a dict of arrays, an array, or a list or another iterable of samples."
        )
    return MemoryData(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A parsed data spec; `spec` itself is without its keys.

    `files` of the kind are sorted by name, `ignored` counts the other files of the folder by suffix. `input_keys` are
    the fields that feed some inputs. `memory` is the data itself if it is in memory.
    """

    spec: str
    kind: str
    files: tuple[DataFile, ...]
    keys: Mapping[str, str]
    input_keys: Mapping[str, str]
    ignored: tuple[str, ...]
    memory: MemoryData | None = None

    @property
    def full_spec(self) -> str:
        """The spec with its keys, to which advice adds others."""
        inputs = {f"inputs.{name}": key for name, key in self.input_keys.items()}
        return ",".join([self.spec, *(f"{key}={value}" for key, value in {**inputs, **self.keys}.items())])


class DataRequest(NamedTuple):
    """The source of the data and the requirements on it; see `open_data`."""

    source: DataSource
    inputs: Sequence[InputSpec]
    samples: int | None
    require_finite: bool
    check_in_background: bool

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs of the model."""
        return [model_input.name for model_input in self.inputs]

    def limit_count(self, count: int) -> int:
        """Return the number of samples to use if `count` are available."""
        return count if self.samples is None else min(count, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Feeds for a model, one per sample. Each iteration starts from the first sample."""

    count: int  # number of samples
    # Hex SHA-256 of the fed values, the same wherever the data is opened and whichever range is read. It is a future
    # while samples are read in the background, which raises a DataError for an invalid sample.
    digest: str | Future[str]
    ignored: tuple[str, ...] = ()  # keys or files of the data that no input takes, for example "labels"
    random: bool = False  # whether the values are random
    # Whether samples of some inputs are repeated, because data of several signatures has different lengths.
    repeats_samples: bool = False
    # For some inputs, the shape of the first item of a function that was split into several samples.
    stacked_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Function that opens the data and yields the feeds from one sample index up to another. It skips earlier samples
    # as cheaply as the format allows.
    open_feeds: Callable[[int, int], Iterator[Feed]]

    def final_digest(self) -> str:
        """Return the digest, after waiting until all samples were read. Raises a DataError for an invalid sample."""
        return self.digest if isinstance(self.digest, str) else self.digest.result()

    def raise_read_errors(self) -> None:
        """Raise the DataError that reading in the background has met so far."""
        if isinstance(self.digest, Future) and self.digest.done():
            self.digest.result()

    def feeds_between(self, start: int, stop: int) -> Iterator[Feed]:
        """Yield the feeds from sample `start` up to `stop`: one dictionary of input names and arrays for each."""
        return self.open_feeds(min(start, self.count), min(stop, self.count))

    def spread_feeds(self, count: int) -> Iterator[Feed]:
        """Yield `count` samples from all over the data."""
        if self.count <= count:
            yield from self
            return
        span_count = count // SAMPLE_SPANS
        for span in range(SAMPLE_SPANS):
            start = span * (self.count - span_count) // (SAMPLE_SPANS - 1)
            yield from self.feeds_between(start, start + span_count)

    def first_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays of the first sample by input; none without samples."""
        return {name: array.shape for name, array in next(self.feeds_between(0, 1), {}).items()}

    def __iter__(self) -> Iterator[Feed]:
        return self.feeds_between(0, self.count)

    def __len__(self) -> int:
        return self.count


def open_data(
    spec: str | MemoryData,
    inputs: Sequence[InputSpec],
    *,
    samples: int | None = None,
    require_finite: bool = True,
    check_in_background: bool = False,
) -> Dataset:
    """Open the data that `spec` names and check it against the `inputs` of the model.

    Args:
        spec: A data spec, or data in memory.
        inputs: Inputs of the model.
        samples: Maximum number of samples to use, from the first one on.
        require_finite: Reject NaN and infinite values.
        check_in_background: Allow samples to be used while a file that must be read completely, for its digest and
            checks, is still being read. `Dataset.final_digest` reports the outcome.

    Raises a DataError if the data cannot be read or does not fit the inputs, and a MissingDependencyError if a package
    that this kind of data needs is not installed.
    """
    if samples is not None and samples < 1:
        raise DataError(f"{samples} samples were requested. Request at least one.")
    if parts := split_by_signature(spec):
        return _open_by_signature(parts, inputs, samples, require_finite=require_finite)
    request = DataRequest(
        source=parse_data_spec(spec),
        inputs=inputs,
        samples=samples,
        require_finite=require_finite,
        check_in_background=check_in_background,
    )
    module, function = DATA_KINDS[request.source.kind].opener.split(":")
    dataset: Dataset = getattr(import_module(f"graphquant.calibration.data.{module}"), function)(request)
    return dataset


_SIGNATURE_SPEC = re.compile(r"(?P<name>[A-Za-z_][\w./-]*)=(?P<spec>.+)", re.DOTALL)
_SETTING = re.compile(
    rf"(inputs\.[^,=]+|kind|{'|'.join(sorted({key for kind in DATA_KINDS.values() for key in kind.keys}))})=.*"
)


def split_by_signature(spec: str | MemoryData) -> dict[str, str | MemoryData]:
    """Return the data of each signature of a TensorFlow model; {} if the spec is data for all of them.

    Such a spec is "text=texts.npz,image=photos,preset=unit", or a dict of specs or dicts in memory.
    """
    if isinstance(spec, MemoryData):
        return dict(spec.by_signature)
    parts: dict[str, str | MemoryData] = {}
    name = ""
    for word in spec.split(","):
        matched = _SIGNATURE_SPEC.fullmatch(word)
        if matched is not None and not _SETTING.fullmatch(word) and (name or not Path(word).exists()):
            name = matched["name"]
            if name in parts:
                raise DataError(f"{spec!r} has data for the signature {name!r} twice. Give each signature once.")
            parts[name] = matched["spec"]
        elif name:
            parts[name] = f"{parts[name]},{word}"
        else:
            return {}
    return parts


def _open_by_signature(
    parts: Mapping[str, str | MemoryData], inputs: Sequence[InputSpec], samples: int | None, *, require_finite: bool
) -> Dataset:
    """Open the data of several signatures as one dataset, whose samples feed the inputs of all of them.

    The longest data sets the number of samples. The samples of the others are repeated, each next to its copies, so
    that a hold-out of the last samples has none of the first ones of any signature.
    """
    missing = next((entry for entry in inputs if entry.signatures and parts.keys().isdisjoint(entry.signatures)), None)
    if missing is not None:
        raise DataError(
            f"The data lacks the signature {missing.signatures[0]!r}, which takes {missing.name!r}. Add"
            f" {missing.signatures[0]}=PATH to the spec, or select signatures with --signature."
        )
    datasets = []
    for name, part in parts.items():
        part_inputs = [model_input for model_input in inputs if name in model_input.signatures]
        if not part_inputs:
            known = list(dict.fromkeys(name for model_input in inputs for name in model_input.signatures))
            raise DataError(
                f"The data is for a signature {name!r}, which the model does not have or which takes no input. Its"
                f" signatures are {', '.join(map(repr, known)) or 'none'}.{did_you_mean(name, known)}"
            )
        datasets.append(open_data(part, part_inputs, require_finite=require_finite))
    total = max(dataset.count for dataset in datasets)

    def open_feeds(start: int, stop: int) -> Iterator[Feed]:
        readers = [_repeat_samples(dataset, total, start, stop) for dataset in datasets]
        for feeds in zip(*readers, strict=True):
            yield {name: value for feed in feeds for name, value in feed.items()}

    # Labels belong to samples of one signature, and the feeds have samples of all.
    ignored = dict.fromkeys(key for dataset in datasets for key in dataset.ignored if key.lower() not in LABEL_KEYS)
    digests = "\n".join(f"{name} {dataset.final_digest()}" for name, dataset in zip(parts, datasets, strict=True))
    return Dataset(
        count=total if samples is None else min(samples, total),
        digest=hashlib.sha256(digests.encode()).hexdigest(),
        ignored=tuple(ignored),
        random=any(dataset.random for dataset in datasets),
        repeats_samples=any(dataset.count < total for dataset in datasets),
        stacked_shapes={name: shape for dataset in datasets for name, shape in dataset.stacked_shapes.items()},
        open_feeds=open_feeds,
    )


def _repeat_samples(dataset: Dataset, total: int, start: int, stop: int) -> Iterator[Feed]:
    """Yield the samples [start, stop) of a dataset whose samples are repeated so that there are `total`."""
    indices = [index * dataset.count // total for index in range(start, stop)]
    feeds = dataset.feeds_between(indices[0], indices[-1] + 1) if indices else iter(())
    for _, copies in itertools.groupby(indices):
        feed = next(feeds)
        yield from (feed for _ in copies)


def parse_data_spec(spec: str | MemoryData) -> DataSource:
    """Parse a data spec. Files are listed, but none is opened except a description in TOML.

    Raises a DataError if the spec names no data, files of several kinds, or keys that its kind does not have. Raises a
    MissingDependencyError if fsspec is needed and not installed.
    """
    if isinstance(spec, MemoryData):
        return DataSource(spec=str(spec), kind="function", files=(), keys={}, input_keys={}, ignored=(), memory=spec)
    matched = _INLINE_SPEC.fullmatch(spec)
    path = matched["path"] if matched else spec
    keys = dict(pair.split("=", 1) for pair in (matched["keys"] if matched else "").split(",")[1:])
    if not path:
        raise DataError(
            f"{spec!r} does not name any data. Use the path of a file or folder, for example calibration.npz."
        )
    if path.endswith(".toml") and not is_remote(path):
        path, described_keys = _read_description(Path(path))
        keys = {**described_keys, **keys}
    elif path.startswith(RANDOM_PREFIX):
        return _make_data_source(path, "random", keys)
    elif _FUNCTION_SPEC.fullmatch(path) and not Path(path).exists():
        return _make_data_source(path, "function", keys)
    return _parse_file_spec(path, keys)


def parse_data_sources(spec: str | MemoryData) -> list[DataSource]:
    """Parse a data spec, or the spec of each signature; see `parse_data_spec`."""
    return [parse_data_spec(part) for part in split_by_signature(spec).values() or (spec,)]


def rebase_data_spec(spec: str, folder: str) -> str:
    """Return `spec`, which is relative to `folder`, relative to the current folder."""
    if parts := split_by_signature(spec):
        return ",".join(f"{name}={rebase_data_spec(str(part), folder)}" for name, part in parts.items())
    if not folder or spec.startswith(RANDOM_PREFIX) or is_remote(spec) or Path(spec).is_absolute():
        return spec
    path = spec.partition(",")[0]
    if _FUNCTION_SPEC.fullmatch(path) and not (Path(folder) / path).exists():
        return spec
    return f"{PurePosixPath(folder, path)}{spec[len(path) :]}" if path else spec


def _parse_file_spec(path: str, keys: dict[str, str]) -> DataSource:
    """Select the files at `path` of the kind in `keys`, or of the only kind that their names identify."""
    files, is_folder = list_data_files(path)
    kind = keys.pop("kind", None)
    if kind is not None and kind not in DATA_KINDS:
        raise DataError(f"kind={kind} is unknown. Use one of {', '.join(DATA_KINDS)}.{did_you_mean(kind, DATA_KINDS)}")
    if kind is not None and not DATA_KINDS[kind].file_pattern:
        raise DataError(
            f"kind={kind} has no files. Write {DATA_KINDS[kind].description.partition(',')[0]} as the spec."
        )
    if kind is not None and not is_folder:
        return _make_data_source(path, kind, keys, tuple(files))
    kinds = {file: _kind_of_file(file) for file in files}
    counts = Counter(name for name in kinds.values() if name)
    if not counts and kind is None:
        raise DataError(
            f"{path} is not a known kind of calibration data. Use an .npz, .npy, .wav, .tfrecord or .parquet file,"
            " images, or a folder of such files. For a quick test, use random:8."
        )
    if len(counts) > 1 and kind is None:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise DataError(f"{path} contains files of several kinds: {counted}. Select one with kind=, or separate them.")
    kind = kind or next(iter(counts))
    # With kind=, files whose names identify no kind are used if no file name identifies that kind.
    used_kind = kind if counts[kind] else None
    used_files = tuple(file for file, name in kinds.items() if name == used_kind)
    if not used_files:
        raise DataError(f"{path} contains no files of kind {kind}. Use the folder that contains them.")
    ignored = Counter(
        PurePosixPath(file.name).suffix or "no suffix" for file, name in kinds.items() if name != used_kind
    )
    ignored_files = tuple(f"files with {suffix} ({count})" for suffix, count in sorted(ignored.items()))
    return _make_data_source(path, kind, keys, used_files, ignored_files)


def _make_data_source(
    spec: str, kind: str, keys: dict[str, str], files: tuple[DataFile, ...] = (), ignored: tuple[str, ...] = ()
) -> DataSource:
    """Create a source after checking its keys."""
    data_kind = DATA_KINDS[kind]
    input_keys = {key.removeprefix("inputs."): value for key, value in keys.items() if key.startswith("inputs.")}
    if input_keys and not data_kind.has_fields:
        raise DataError(f"{spec} is of kind {kind}, which has no named fields. Remove inputs.{next(iter(input_keys))}.")
    kind_keys = {key: value for key, value in keys.items() if not key.startswith("inputs.")}
    for key in kind_keys:
        if key not in data_kind.keys:
            accepted = f"It takes {', '.join(data_kind.keys)}." if data_kind.keys else "It has no keys."
            raise DataError(
                f"{spec} is of kind {kind}, which has no key {key!r}.{did_you_mean(key, data_kind.keys)} {accepted}"
            )
    return DataSource(spec=spec, kind=kind, files=files, keys=kind_keys, input_keys=input_keys, ignored=ignored)


def _kind_of_file(file: DataFile) -> str | None:
    name = PurePosixPath(file.name).name.lower()
    return next((kind for kind, known in DATA_KINDS.items() if re.fullmatch(known.file_pattern, name)), None)


def _read_description(path: Path) -> tuple[str, dict[str, str]]:
    """Return the path and the keys of a description in TOML."""
    if not path.is_file():
        raise DataError(f"The file {path} does not exist. Use the path of the calibration data.")
    file = DataFile(str(path))
    with wrap_read_errors(file, "Write path and the keys as TOML."):
        table = tomllib.loads(file.read(MAX_TOML_BYTES).decode())
    data_path = table.pop("path", None)
    if not isinstance(data_path, str) or not data_path:
        raise DataError(f"{path} has no path of the data. Set path to a file or folder, relative to this file.")
    if data_path.endswith(".toml") or data_path.startswith(RANDOM_PREFIX) or _FUNCTION_SPEC.fullmatch(data_path):
        raise DataError(
            f"{path}: path = {data_path!r} is not a data file. A description cannot execute code; use a file or folder."
        )
    inputs = table.pop("inputs", {})
    fields = (
        {f"inputs.{name}": name_of_field for name, name_of_field in inputs.items()}
        if isinstance(inputs, dict)
        else {"inputs": inputs}
    )
    keys = {key: _toml_value_text(path, key, value) for key, value in {**table, **fields}.items()}
    return (data_path if is_remote(data_path) else str(path.parent / data_path)), keys


def _toml_value_text(path: Path, key: str, value: Any) -> str:
    """Return a TOML value as it is written in a spec: `[1, 2]` as `1:2`."""
    if isinstance(value, list):
        return ":".join(_toml_value_text(path, key, element) for element in value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{path}: {key} is neither a number, a string nor a list of them. See docs/data.md for its values.")
