"""HTTP and gRPC in front of the runtime. Imports neither torch nor export nor quant.

Start with plane/dataplane.py, which both protocols call; main.py runs a server.
"""
