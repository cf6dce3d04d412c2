"""The server's behaviour, which both protocols share.

Start in dataplane.py; extensions.py and generation.py have what it does beyond single requests.
"""
