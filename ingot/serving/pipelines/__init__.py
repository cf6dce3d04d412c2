"""Pipelines: models and steps that read each other's outputs, served as one model.

plan.py fits a declared pipeline to its models, run.py answers one request, and pipeline.py is what the server serves.
"""
