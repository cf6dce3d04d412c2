"""The machine that the process runs on.

Start in devices.py; memory.py and cgroup.py say how much memory there is, nvml.py reads the state of GPUs, and
plugins.py finds the engines of other packages.
"""
