"""Many models: a manifest of them, workers, a cache, and reports."""
