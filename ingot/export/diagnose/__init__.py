"""Diagnosis of a failed export: the first diverging operation, and all obstacles to a capture."""
