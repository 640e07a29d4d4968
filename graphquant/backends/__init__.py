"""What each backend will run in low precision, and what is probably wrong with a quantized model."""

from graphquant.backends.types import Broken, Finding, Report, Verdict

__all__ = ["Broken", "Finding", "Report", "Verdict"]
