"""The Open Inference Protocol for clients and servers: requests and responses, in JSON and Protocol Buffers.

Start with requests.py. Nothing here opens a connection or runs a model.
"""
