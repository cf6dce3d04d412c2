"""Signatures of archives, and the policies that decide which signatures are accepted.

Start in policy.py, which servers call; signing.py signs an archive and verifies its
signatures, cosign.py and oms.py do so in the formats of other tools, keys.py does the cryptography.
"""
