"""Capture: turn a PyTorch module into a Program, by one of several routes."""
