"""Signatures of archives, and the policies that decide which signatures are accepted.

Start in policy.py, which servers call; signing.py signs an archive and verifies its
signatures, keys.py does the cryptography.
"""
