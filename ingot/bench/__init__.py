"""A load generator for inference servers: ``ingot bench``."""
