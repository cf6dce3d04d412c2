"""``ingot deploy``: manifests, and how many replicas a load needs."""
