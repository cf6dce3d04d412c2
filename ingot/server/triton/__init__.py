"""Triton's extensions of the protocol that need neither a data plane nor a codec.

Start at delivery.py (what a request wants of an output), shared_memory.py (regions that clients register) and logs.py.
"""
