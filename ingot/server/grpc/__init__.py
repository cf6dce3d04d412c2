"""The Open Inference Protocol over gRPC.

Start at fast.py (the listener and its services); calls.py runs calls, connection.py puts HTTP/2 on a transport.
"""
