"""Quantization schemes, which change layers of a graph in place, and plans, which assign a scheme to each layer."""
