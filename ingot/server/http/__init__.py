"""HTTP/1.1 on httptools: inference and health checks on the connection itself, all else by FastAPI.

Start with connection.py (bytes in, responses out), then exchange.py (one request) and decoder.py (its body).
"""
