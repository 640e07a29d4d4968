"""Presentation of models, plans and results: terminal text, JSON, pages, pictures and notebooks."""

JSON_SCHEMA_VERSION = 2  # version of the JSON output of all commands; docs/json.md describes it
