"""Measurement of one candidate against the original: accuracy, latency and size.

Start in runner.py, which builds, loads, times and compares plans; trial.py has the measurements of one plan, limits.py
the budget of time, and comparison.py is ``ingot compare``.
"""
