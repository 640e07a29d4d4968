"""Drawings of models, plans and results: tables for the terminal, JSON and DOT for other tools."""
