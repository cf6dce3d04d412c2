"""Sounds: from the bytes of files to the values that a model was trained on.

``decoding`` reads files and resamples, ``operations`` and ``mel`` are what is then done to samples, ``audio`` is the
step of all. ``extractors`` reads the operations from transformers' feature extractors, and ``synthesis`` makes the
sounds on which an export proves them.
"""
