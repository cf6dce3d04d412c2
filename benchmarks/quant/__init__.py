"""Accuracy and speed of models quantized by Ingot and by its peers: see ``python -m benchmarks.quant --help``."""
