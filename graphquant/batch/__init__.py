"""Quantization of many models: manifest, cache, workers, cluster and reports."""
