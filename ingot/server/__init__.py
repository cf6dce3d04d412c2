"""HTTP and gRPC in front of the runtime, and a client for both. Imports neither torch nor export and quant.

Nothing is imported here: a client needs no web framework, and a server no client.
"""
