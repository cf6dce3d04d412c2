"""Generating tokens with decoders: the requests, the rows that share an engine's steps, and the choice of each token.

The requests of a model share the steps of one engine: each step gives every running row one token, and reads a bounded
part of the prompts that enter. ``policy.py`` decides what a step does, without a clock, a thread or an engine.
"""
