"""The management listener: it loads, unloads and reloads models of a running server.

``listener.py`` opens it, ``places.py`` finds its address. Its operations are those of ``server/plane/operations.py``
with ``serving/control.py``.
"""
