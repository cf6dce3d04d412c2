"""Commands that serve models and ask servers."""
