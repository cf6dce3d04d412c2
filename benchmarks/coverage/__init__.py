"""How much of the world an exporter can take: see ``python -m benchmarks.coverage --help`` and docs/export.md."""
