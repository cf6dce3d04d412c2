"""The management listener: it loads, unloads and reloads models of a running server.

HTTP (``server/http/repository.py``) and gRPC (``server/grpc/service.py``) call
``serving/control.py``; ``places.py`` finds the listener's address, and
``server/management_listener.py`` opens it.
"""

ELSEWHERE = (
    "models are loaded and unloaded on the server's management listener, not on this port: ingot server finds it, and "
    "ingot serve prints its address"
)
"""Why other listeners refuse repository control."""
