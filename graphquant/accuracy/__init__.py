"""What each quantization does to a model's outputs, and the plan that does least for its cost."""

from graphquant.accuracy.blame import Blame, blame

__all__ = ["Blame", "blame"]
