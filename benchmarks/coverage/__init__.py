"""How many kinds of models an exporter supports.

See ``python -m benchmarks.coverage --help`` and docs/guides/make/export.md.
"""
