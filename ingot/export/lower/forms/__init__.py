"""The ONNX forms of PyTorch's operators that its exporter lacks or gets wrong, one group of operators per module.

Start in translations.py, which lists all of them.
"""
