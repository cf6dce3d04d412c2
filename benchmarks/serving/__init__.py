"""Serving compared with peers: throughput, latency, cost and goodput, measured in one run."""
