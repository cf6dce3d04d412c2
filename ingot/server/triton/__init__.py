"""Triton's extensions of the protocol that need neither a data plane nor a codec.

Start at outputs.py (classes, or values in shared memory), shared_memory.py (regions that clients register) and logs.py.
"""
