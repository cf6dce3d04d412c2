"""HTTP/2 for servers without I/O: bytes in, callbacks and bytes out (RFC 9113)."""
