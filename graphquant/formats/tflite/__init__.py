"""TFLite models: read only, for their graphs and scales, without TensorFlow."""

from graphquant.formats.tflite.load import load, parse_tflite
