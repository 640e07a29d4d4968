"""Data specs: `PATH,key=value,...`, a `.toml` file with the same keys, `module:function`, or `random:N`."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from graphquant.data.files import File, found, reading, remote
from graphquant.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

RANDOM = "random:"

MAX_TOML_BYTES = 1 << 20

PIXELS = ("preset", "size", "resize", "crop_pct", "filter", "fill", "layout", "order", "scale", "mean", "std")
"""Keys that say how a picture becomes numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of data.

    Attributes:
        explains: What it is.
        module: The module whose function `batches` opens it.
        names: A regular expression for the names of its files; none where no file tells it.
        keys: What a spec of it may say.
        fields: Whether its samples have named fields, so that `inputs.NAME=FIELD` may say which input takes which.
    """

    explains: str
    module: str
    names: str = ""
    keys: tuple[str, ...] = ()
    fields: bool = False


KINDS: dict[str, Kind] = {
    "npz": Kind(
        explains="arrays under the names of the inputs, numpy.savez",
        module="graphquant.data.arrays",
        names=r".*\.npz",
        fields=True,
    ),
    "npy": Kind(
        explains="one array, numpy.save, for models with one input",
        module="graphquant.data.arrays",
        names=r".*\.npy",
    ),
    "onnx-test-set": Kind(
        explains="folders with input_0.pb, input_1.pb and so on, each folder one run of the model",
        module="graphquant.data.onnx_sets",
        names=r"input_\d+\.pb",
    ),
    "images": Kind(
        explains="pictures, each one sample, for models with one input",
        module="graphquant.data.images",
        names=r".*\.(jpe?g|png|bmp|gif|webp|tiff?|ppm|pgm)",
        keys=PIXELS,
    ),
    "audio": Kind(
        explains="wav files, each one sample, for models with one input",
        module="graphquant.data.audio",
        names=r".*\.wav",
        keys=("rate", "length", "pad", "scale"),
    ),
    "tfrecord": Kind(
        explains="records of tf.train.Example, each one sample",
        module="graphquant.data.tfrecord",
        names=r".*\.tfrec(ord)?s?(-\d+-of-\d+)?(\.gz)?",
        keys=PIXELS,
        fields=True,
    ),
    "parquet": Kind(
        explains="tables whose columns are inputs, each row one sample",
        module="graphquant.data.parquet",
        names=r".*\.(parquet|pq)",
        keys=PIXELS,
        fields=True,
    ),
    "function": Kind(
        explains="module:function, Python code that gives any iterable; it is run",
        module="graphquant.data.function",
        fields=True,
    ),
    "random": Kind(explains="random:N, N made-up samples for tests", module="graphquant.data.random"),
}

_INLINE = re.compile(r"(?P<path>.*?)(?P<keys>(,[a-z_]+(\.[^,=]+)?=[^,]*)*)", re.DOTALL)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a spec says.

    Attributes:
        spec: The spec itself, without its keys.
        kind: One of `KINDS`.
        files: The files of that kind, sorted by name.
        keys: What was said about them.
        inputs: For some inputs the field that feeds them.
        ignored: Other files of the folder, by suffix.
    """

    spec: str
    kind: str
    files: tuple[File, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def parse(spec: str) -> Source:
    """What `spec` says; files are listed, but none is opened other than a description in TOML.

    Raises:
        DataError: It names nothing, files of several kinds, or keys that its kind does not have.
        MissingDependencyError: fsspec is needed and not installed.
    """
    matched = _INLINE.fullmatch(spec)
    path = matched["path"] if matched else spec
    keys = dict(pair.split("=", 1) for pair in (matched["keys"] if matched else "").split(",")[1:])
    if not path:
        raise DataError(f"{spec!r} names no data. Give the path of a file or folder, as in calibration.npz.")
    if path.endswith(".toml") and not remote(path):
        path, written = _described(Path(path))
        keys = {**written, **keys}
    elif path.startswith(RANDOM):
        return _source(path, "random", keys)
    elif _FUNCTION.fullmatch(path) and not Path(path).exists():
        return _source(path, "function", keys)
    return _in_files(path, keys)


def moved(spec: str, folder: str) -> str:
    """`spec`, which names its file from `folder`, as it names it from the current folder."""
    if not folder or spec.startswith(RANDOM) or remote(spec) or Path(spec).is_absolute():
        return spec
    path = spec.partition(",")[0]
    if _FUNCTION.fullmatch(path) and not (Path(folder) / path).exists():
        return spec
    return f"{PurePosixPath(folder, path)}{spec[len(path) :]}" if path else spec


def _in_files(path: str, keys: dict[str, str]) -> Source:
    files, folder = found(path)
    kind = keys.pop("kind", None)
    if kind is not None and kind not in KINDS:
        raise DataError(f"kind={kind} is unknown. Known are {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if kind is not None and not KINDS[kind].names:
        raise DataError(f"kind={kind} has no files. Write {KINDS[kind].explains.partition(',')[0]} as the spec itself.")
    if kind is not None and not folder:
        return _source(path, kind, keys, tuple(files))
    kinds = {file: _kind_of(file) for file in files}
    counts = Counter(name for name in kinds.values() if name)
    if not counts and kind is None:
        known = "an .npz, .npy, .wav, .tfrecord or .parquet file, pictures, or a folder of such files"
        raise DataError(f"{path} is no calibration data that is known. Give {known}; random:8 tries things out.")
    if len(counts) > 1 and kind is None:
        held = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise DataError(f"{path} holds files of several kinds: {held}. Say which to use with kind=, or part them.")
    chosen = kind or next(iter(counts))
    # Files whose names tell nothing are of the kind that was asked for, if no name tells it.
    named = counts[chosen] > 0
    used = [file for file, name in kinds.items() if (name == chosen if named else name is None)]
    if not used:
        raise DataError(f"{path} holds no files of kind {chosen}. Give the folder that does.")
    ignored = Counter(PurePosixPath(file.name).suffix or "no suffix" for file in files if file not in set(used))
    others = tuple(f"files with {suffix} ({count})" for suffix, count in sorted(ignored.items()))
    return _source(path, chosen, keys, tuple(used), others)


def _source(
    spec: str, kind: str, keys: dict[str, str], files: tuple[File, ...] = (), ignored: tuple[str, ...] = ()
) -> Source:
    """A source whose keys are those of its kind."""
    known = KINDS[kind]
    takers = {key.removeprefix("inputs."): value for key, value in keys.items() if key.startswith("inputs.")}
    if takers and not known.fields:
        raise DataError(f"{spec} is of kind {kind}, which has no named fields. Leave inputs.{next(iter(takers))} out.")
    own = {key: value for key, value in keys.items() if not key.startswith("inputs.")}
    for key in own:
        if key not in known.keys:
            takes = f"It takes {', '.join(known.keys)}." if known.keys else "It takes none."
            raise DataError(
                f"{spec} is of kind {kind}, which has no key {key!r}.{did_you_mean(key, known.keys)} {takes}"
            )
    return Source(spec=spec, kind=kind, files=files, keys=own, inputs=takers, ignored=ignored)


def _kind_of(file: File) -> str | None:
    name = PurePosixPath(file.name).name.lower()
    return next((kind for kind, known in KINDS.items() if known.names and re.fullmatch(known.names, name)), None)


def _described(path: Path) -> tuple[str, dict[str, str]]:
    """The path and the keys that a description in TOML has."""
    if not path.is_file():
        raise DataError(f"There is no file {path}. Give the path of the calibration data.")
    file = File(str(path))
    with reading(file, "Write path = and the keys as TOML."):
        held = tomllib.loads(file.read(MAX_TOML_BYTES).decode())
    data = held.pop("path", None)
    if not isinstance(data, str) or not data:
        raise DataError(f"{path} does not say where the data is. Write path = with a file or folder beside it.")
    if data.endswith(".toml") or data.startswith(RANDOM) or _FUNCTION.fullmatch(data):
        raise DataError(
            f"{path}: path = {data!r} is no file of data. A description runs no code; give a file or folder."
        )
    keys: dict[str, str] = {}
    for key, value in held.items():
        if key == "inputs" and isinstance(value, dict):
            keys |= {f"inputs.{name}": _word(path, f"inputs.{name}", field) for name, field in value.items()}
        else:
            keys[key] = _word(path, key, value)
    return (data if remote(data) else str(path.parent / data)), keys


def _word(path: Path, key: str, value: Any) -> str:
    """A TOML value as it is written in a spec: `[1, 2]` as `1:2`."""
    if isinstance(value, list):
        return ":".join(_word(path, key, one) for one in value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"{path}: {key} is neither a number, a word nor a list of them. See docs/data.md for what it takes."
    )
