"""Tokens of a decoder: this server, and the ways of transformers."""
