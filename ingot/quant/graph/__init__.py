"""The model that is quantized, and its layers.

Start in source.py; layers.py finds the nodes with weights.
"""
