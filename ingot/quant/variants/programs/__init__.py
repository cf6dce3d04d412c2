"""Quantization of captured PyTorch programs. Everything here imports torch: import it where it is used.

Start in graph.py, which reads and captures programs; pt2e.py writes int8 into them, half.py half precision.
"""
