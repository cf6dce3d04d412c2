"""Capture: turn a PyTorch module into a Program, by one of several routes.

Start in routes.py, which tries the routes; conditions.py checks what a route assumed.
"""
