"""Quantization schemes, which change layers of a graph in place, and plans, which assign a scheme to each layer.

Start in plan.py; static.py is the scheme for convolutions, dynamic.py that for language models.
"""
