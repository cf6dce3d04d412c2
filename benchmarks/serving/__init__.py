"""Serving beside the peers: throughput, latency, cost and goodput, measured in one run."""
