"""Reports of quantizations and comparisons.

Start in records.py, the data that travels in archives; page.py and view.py show it as HTML and as text.
"""
