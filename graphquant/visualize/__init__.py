"""Presentation of models, plans and results: terminal text, JSON, pages, pictures and notebooks."""
