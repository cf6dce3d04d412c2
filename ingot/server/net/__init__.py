"""What HTTP and gRPC share of connections.

listening.py opens sockets, tls.py reads certificates, compression.py has the encodings of bodies, and limits.py bounds
what clients may use.
"""
