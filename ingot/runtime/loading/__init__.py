"""The steps between an archive and a model that is ready: choice, checks, warm-up.

Start in runnable.py; admission.py applies the trust policy.
"""
