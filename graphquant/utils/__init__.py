"""Helpers that are independent of models: atomic files, reproducible TensorFlow, notebook HTML, text of messages."""
