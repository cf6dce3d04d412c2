"""The proof that a graph equals its model: example inputs for both, and the comparison of their outputs."""
