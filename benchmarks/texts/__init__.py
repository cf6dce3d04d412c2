"""Embeddings of texts of real lengths: this server compared with others, and with its engine alone."""
