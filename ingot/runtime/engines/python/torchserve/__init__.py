"""Handlers of TorchServe as models in Python: their rows, calls and answers. They run in engine processes only.

Source: ts/service.py, ts/model_loader.py and ts/protocol of https://github.com/pytorch/serve 0.12.
"""
