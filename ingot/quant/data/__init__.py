"""Samples for calibration and measurement: read from files, folders, traffic or functions, or generated.

Start in samples.py, whose checked samples all other packages receive.
"""
