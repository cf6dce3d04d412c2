"""Models that are classes in Python: their interface, files and calls. They run in engine processes only."""
