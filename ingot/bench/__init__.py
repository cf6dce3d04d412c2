"""Load generation for measurements.

Start in load.py, a separate program: an interpreter lock shared with the server would distort the figures.
"""
