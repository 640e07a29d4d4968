"""Optimization algorithms that reduce the rounding error, and the search for the plan of the lowest cost."""
