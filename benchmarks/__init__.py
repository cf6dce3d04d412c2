"""Measurements behind every performance claim; each is run by hand and prints its own table."""
