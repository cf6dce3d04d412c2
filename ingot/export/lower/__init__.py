"""Lowering: convert a Program to a format that an engine runs. There is one module per format.

Start in onnx.py; the forms of single operators are in forms/. program.py and aoti.py lower to PyTorch's formats, and
partition.py splits a model that no single engine runs.
"""
