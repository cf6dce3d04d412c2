"""Engines of the formats of PyTorch. Start in torch_engine.py."""
