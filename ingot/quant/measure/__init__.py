"""Measurement of one candidate against the original: accuracy, latency and size.

Start in trial.py, which builds, loads, times and compares one plan; limits.py has the budget of time, and
comparison.py is ``ingot compare``.
"""
