"""How many kinds of models an exporter supports: see ``python -m benchmarks.coverage --help`` and docs/export.md."""
