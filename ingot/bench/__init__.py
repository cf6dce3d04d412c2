"""The HTTP load generator of ``ingot demo``.

Start in load.py, a separate program: an interpreter lock shared with the server would distort the figures.
"""
