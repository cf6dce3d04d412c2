"""The steps between an archive and a model that is ready: choice, checks, warm-up.

Start in load_spec.py; trust_check.py applies the trust policy.
"""
