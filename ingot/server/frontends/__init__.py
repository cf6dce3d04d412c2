"""Front processes: HTTP and gRPC in processes without models, for machines with many cores. Experimental.

Start with supervisor.py, which runs in the main process; process.py is the program of a front.
"""
