"""TorchServe's APIs: inference, management and metrics over HTTP, and inference and management over gRPC.

``listeners.py`` opens their ports. Addresses, bodies and status codes are those of TorchServe 0.12.
"""
