"""Lowering: convert a Program to a format that an engine runs. There is one module per format."""
