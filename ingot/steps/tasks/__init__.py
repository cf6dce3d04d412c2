"""The steps of each task, as functions whose options are fields of these steps; declared.py reads TOML files."""
