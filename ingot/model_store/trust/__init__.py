"""Signatures of archives, and the policies that decide which signatures are accepted.

Start in policy.py, which servers call; signing.py makes and verifies one signature.
"""
