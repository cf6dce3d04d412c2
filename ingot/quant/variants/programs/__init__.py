"""Quantization of captured PyTorch programs. Everything here imports torch: import it where it is used.

Start in graph.py.
"""
