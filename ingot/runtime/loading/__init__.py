"""The steps between an archive and a model that is ready: choice, checks, warm-up.

Start in loader.py, which takes them in order; source.py and load_spec.py describe what is loaded, and trust_check.py
applies the trust policy.
"""
