"""What operators see of single requests: ids, the access log, and traces.

Metrics are sums, and those of :mod:`ingot.runtime.metrics`.
"""
