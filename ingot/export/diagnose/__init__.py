"""Diagnosis of a failed export: the first diverging operation, and all obstacles to a capture.

Start in divergence.py for a wrong output and in deep.py for a failed capture.
"""
