"""Sketches, which are the statistics of tensors, and the observers that choose a range from a sketch."""

from graphquant.observers.block_search import search_block_params
from graphquant.observers.distribution import Distribution, distribution_of
from graphquant.observers.observers import OBSERVERS, QuantizationCost, estimate_cost, histogram_bits, least_sqnr
from graphquant.observers.sketch import (
    EMPTY_SKETCH,
    Sketch,
    SketchAccumulator,
    add_all,
    bin_means,
    merge_sketches,
    sketch_values,
)
