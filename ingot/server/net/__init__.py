"""What HTTP and gRPC share of connections: sockets, TLS, compression, and limits on what clients may use."""
