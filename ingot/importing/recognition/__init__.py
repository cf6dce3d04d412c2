"""Handlers whose code has a known form, recognized from the syntax tree: none of the code runs.

Start reading at ``form.py``, which says what is found; ``reader.py`` follows the values of a request through the code.
"""
