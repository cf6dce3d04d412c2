"""Lowering: convert a Program to a format that an engine runs. There is one module per format.

Start in onnx.py; the forms of single operators are in forms/. partition.py splits a model that no single engine runs.
"""
