"""GPUs: streams, events and memory of a device, and the pipeline that keeps it busy. Start in pipeline.py.

``metrics.py`` reads the memory and utilization of all GPUs when metrics are scraped.
"""
