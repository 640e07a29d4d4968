"""Calibration: run data through a model and collect one sketch for each tensor whose range depends on data."""
