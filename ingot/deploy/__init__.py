"""Manifests that run a server elsewhere; a plan is computed once, and each target writes it in its own objects.

Start in plan.py for what is computed from models and settings, and kubernetes.py for the objects. ``capacity/``
computes how many replicas hold an objective.
"""
