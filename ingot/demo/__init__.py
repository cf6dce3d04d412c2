"""The digits demo: a small model on real data, all the way.

Start in digits.py, which trains the model; cli/demo.py runs the steps.
"""
