"""Helpers that know nothing of models: atomic file writes, deterministic TensorFlow kernels."""
