"""Graph passes: each takes a graph and gives a rewritten one, and says how often it did something."""
