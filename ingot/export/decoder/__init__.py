"""Decoders of transformers: a graph with an explicit cache, and the proof that its greedy tokens are ``generate()``'s.

Start in pipeline.py.
"""
