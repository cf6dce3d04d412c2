"""Benchmarks of scale: one file per question, run as ``python -m benchmarks.scale.NAME``."""
