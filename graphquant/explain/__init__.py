"""Why a tensor or op is quantized as it is: rules that were tried, what is in the model, what a backend makes of it."""

from graphquant.explain.foretold import foretold, meant_for
from graphquant.explain.rules import explain
from graphquant.explain.types import Explained, Explanation
from graphquant.explain.written import NO_RULES, explain_written

__all__ = ["NO_RULES", "Explained", "Explanation", "explain", "explain_written", "foretold", "meant_for"]
