"""Records and shared memory between the processes of a server.

Start in records.py; arena.py holds tensors that are too large to be copied through a socket.
"""
