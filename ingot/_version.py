"""Ingot's version, which every module may import from here."""

__version__ = "0.1.0"
