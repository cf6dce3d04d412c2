"""GPUs: streams, events and memory of a device, and the pipeline that keeps it busy. Start in pipeline.py.

``nvml.py`` reads the memory and utilization of GPUs, for the choice of one, memory budgets and metrics.
"""
