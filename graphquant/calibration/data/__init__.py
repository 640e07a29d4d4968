"""Calibration data in any supported format, read as one feed per sample. See docs/data.md for data specs."""

from graphquant.calibration.data.dataset import (
    Dataset,
    MemoryData,
    as_data_spec,
    open_data,
    parse_data_sources,
    split_by_signature,
)
