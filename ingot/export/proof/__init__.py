"""The proof that a graph equals its model: example inputs for both, and the comparison of their outputs.

Start in parity.py, which compares outputs, examples.py, which generates inputs, and independence.py, which compares a
batch with its samples.
"""
