"""The fast gRPC server: HTTP/2 and gRPC on asyncio alone."""
