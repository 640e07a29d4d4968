"""What differs between two models, or two plans: structure first, quantization told apart from it."""

from graphquant.differences.models import diff_models
from graphquant.differences.plans import diff_plans
from graphquant.differences.types import KINDS, Change, Differences

__all__ = ["KINDS", "Change", "Differences", "diff_models", "diff_plans"]
