"""Why a tensor or op is quantized as it is: rules that were tried, what is in the model, what a backend makes of it."""

from graphquant.explain.foretold import foretold, meant_for
from graphquant.explain.rules import explain
from graphquant.explain.types import Explained, Explanation
from graphquant.explain.written import explain_written

__all__ = ["Explained", "Explanation", "explain", "explain_written", "foretold", "meant_for"]
