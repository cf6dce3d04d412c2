"""HTTP and gRPC in front of the runtime, and a client for both. Imports neither torch nor export nor quant.

Start with dataplane.py, which both protocols call; main.py runs a server. Nothing is imported here: a client needs no
web framework, and a server no client.
"""
