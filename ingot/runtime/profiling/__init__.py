"""Measured times of engine calls and of operators, and the memory of a call. Start in profile.py."""
