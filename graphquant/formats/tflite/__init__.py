"""TFLite models: read, to look at them and to use their scales. Nothing here needs TensorFlow."""

from graphquant.formats.tflite.read import load, parse

__all__ = ["load", "parse"]
