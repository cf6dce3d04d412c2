"""Serving on a GPU against the engine alone, and the gain of lanes."""
