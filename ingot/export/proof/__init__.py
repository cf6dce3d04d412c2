"""The proof that a graph equals its model: inputs to ask both, and how their answers are compared."""
