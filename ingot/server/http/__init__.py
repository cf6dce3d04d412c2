"""HTTP/1.1 on httptools: the connection serves inference and health checks, FastAPI the rest.

Start with connection.py (bytes in, responses out), then exchange.py (one request) and json_memo.py (its body).
"""
