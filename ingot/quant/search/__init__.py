"""The search for the fastest plan that keeps the accuracy.

Start in search.py; families.py has the plans that it begins with, sensitivity.py ranks the layers, journal.py lets an
interrupted search continue.
"""
