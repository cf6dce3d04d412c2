"""HTTP/2 for servers without I/O: bytes in, callbacks and bytes out (RFC 9113).

Start in connection.py, which receives; sender.py sends within the flow-control windows, and frames.py has the format.
"""
