"""Generating tokens with decoders: the requests, and the rows that share an engine's steps.

The requests of a model share the steps of one engine: each step gives every running row one token, and reads a bounded
part of the prompts that enter. ``policy.py`` decides what a step does, without a clock, a thread or an engine. The
engine chooses the tokens: ``runtime/engines/decoder/sampling.py``.
"""
