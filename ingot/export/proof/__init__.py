"""The proof that a graph equals its model: example inputs for both, and the comparison of their outputs.

Start in parity.py, which compares outputs, and examples.py, which generates inputs.
"""
