"""The Open Inference Protocol for clients and servers: requests and responses, in JSON and Protocol Buffers.

Start with requests.py; json_codec.py and proto_codec.py convert requests and responses, the latter to the messages of
open_inference_pb2.py, which is generated. Nothing here opens a connection or runs a model.
"""
