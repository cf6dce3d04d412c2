"""The management listener: it loads, unloads and reloads models of a running server.

``listener.py`` opens it, ``places.py`` finds its address. HTTP (``server/http/repository.py``) and gRPC
(``server/grpc/service.py``) call ``serving/control.py``.
"""
