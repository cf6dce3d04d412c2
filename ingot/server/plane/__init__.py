"""The server's behaviour, which both protocols share.

Start in operations.py, the table of everything that a server does, and dataplane.py, which serves inference;
extensions.py and generation.py have what goes beyond single requests.
"""
