"""Load generation for measurements."""
