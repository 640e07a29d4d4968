"""TFLite models: read, to look at them and to use their scales. Nothing here needs TensorFlow."""

from graphquant.formats.tflite.load import load, parse_tflite

__all__ = ["load", "parse_tflite"]
