"""The machine: its devices, memory, GPUs and control group, and the plug-ins on it. Start in devices.py."""
