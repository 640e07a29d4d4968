"""Calibration data in Parquet files: columns are inputs, each row one sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.data.cells import filler
from graphquant.data.files import INSTALL, File, hashed, reading
from graphquant.data.fit import find_keys
from graphquant.data.samples import one_each
from graphquant.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.data.base import Batches, Feed, Wanted
    from graphquant.data.spec import Source

ROWS = 16
"""Rows that are decoded at a time."""

ADVICE = "See that it is a whole Parquet file."


def batches(source: Source, wanted: Wanted) -> Batches:
    """The rows of all files, in order; row groups before the first row are skipped. The digest is over the files.

    Raises:
        DataError: A file is broken, or its columns do not fit the inputs.
        MissingDependencyError: pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(f"{source.spec} needs the package pyarrow. Install it: {INSTALL}") from error
    counts: list[int] = []
    ignored: dict[str, None] = {}
    for file in source.files:
        with reading(file, ADVICE), file.open() as stream, parquet.ParquetFile(stream) as table:
            counts.append(table.metadata.num_rows)
            held = table.schema_arrow.names
        used = find_keys(file.name, held, wanted)
        ignored |= dict.fromkeys(name for name in held if name not in used)
    fillers = {taker.name: filler(source, taker) for taker in wanted.inputs}

    def read(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        before = 0
        for file, count in zip(source.files, counts, strict=True):
            first, last = max(start - before, 0), min(stop - before, count)
            before += count
            for index, row in enumerate(_rows(file, wanted, first, last) if first < last else (), first):
                where = f"{file.name}: row {index}"
                yield where, {name: fillers[name](f"{where}: {name!r}", value) for name, value in row.items()}

    digest = hashed(f"{source.keys} {source.inputs} {wanted.samples}", source.files)
    return one_each(source, wanted, read, count=sum(counts), digest=digest, unused=ignored)


def _rows(file: File, wanted: Wanted, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """The rows from `start` up to `stop`: a value for each input."""
    from pyarrow import parquet

    with reading(file, ADVICE), file.open() as stream, parquet.ParquetFile(stream) as table:
        keys = find_keys(file.name, table.schema_arrow.names, wanted)
        groups: list[int] = []
        index = 0
        for group in range(table.metadata.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            if index + size > start or groups:
                groups.append(group)
            else:
                index += size
        for batch in table.iter_batches(batch_size=ROWS, row_groups=groups, columns=keys):
            for row in range(max(start - index, 0), min(stop - index, batch.num_rows)):
                yield {
                    taker.name: _value(f"{file.name}: row {index + row}: {key!r}", batch.column(key)[row])
                    for taker, key in zip(wanted.inputs, keys, strict=True)
                }
            index += batch.num_rows
            if index >= stop:
                return


def _value(where: str, cell: Any) -> Any:
    """Numbers, or the bytes of a picture, bare or as the field "bytes" of a struct."""
    import pyarrow as pa

    if isinstance(cell, pa.ExtensionScalar):
        cell = cell.value
    if isinstance(cell, pa.StructScalar) and cell.is_valid and "bytes" in cell:
        cell = cell["bytes"]
    if not cell.is_valid:
        raise DataError(f"{where} is null. Give each row a value for each input.")
    if isinstance(cell, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        values = cell.values
        while isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            values = values.flatten()
        if values.null_count:
            raise DataError(f"{where} holds null. Give numbers.")
        return values.to_numpy(zero_copy_only=False)
    if isinstance(cell, pa.StructScalar):
        raise DataError(f"{where} is a struct without bytes of a picture. Give numbers, lists of numbers, or bytes.")
    return cell.as_py() if isinstance(cell, pa.BinaryScalar | pa.LargeBinaryScalar) else _scalar(cell)


def _scalar(cell: Any) -> Any:
    """One number or text as an array of one; numbers keep their dtype."""
    import pyarrow as pa

    return np.asarray(pa.array([cell.as_py()], cell.type).to_numpy(zero_copy_only=False))
