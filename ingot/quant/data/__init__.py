"""Samples for calibration and measurement: read from files, folders, traffic or functions, or generated.

Start in samples.py, the checked form in which every other folder receives them.
"""
