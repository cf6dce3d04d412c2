"""GPUs: streams, events and memory of a device, and the pipeline that keeps it busy. Start in pipeline.py.

``graphs.py`` chooses the batches that engines capture as CUDA graphs. ``nvml.py`` reads the memory and utilization of
GPUs, for the choice of one, memory budgets and metrics.
"""
