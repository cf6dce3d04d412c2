"""Graph passes: each returns a rewritten copy of a graph, and how many places it changed.

Start reading at manager.py; patterns are in fx_pattern.py for FX graphs and in onnx.py for ONNX graphs.
"""
