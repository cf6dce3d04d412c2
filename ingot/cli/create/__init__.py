"""Commands that make archives."""
