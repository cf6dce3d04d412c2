"""Estimates of what a model needs to be exported and served, without its weights.

The module is built and run on fake tensors, which have shapes and datatypes but no data: a model of 70 billion
parameters takes half a gigabyte of memory. Start reading at :func:`ingot.export.estimate.plan.plan`.
"""
