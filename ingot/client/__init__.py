"""Clients for any Open Inference Protocol server, blocking and asynchronous, over HTTP and gRPC."""
