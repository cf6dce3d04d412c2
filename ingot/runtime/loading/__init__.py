"""The steps between an archive and a model that is ready: choice, checks, warm-up.

Start in loader.py for one engine and runnable.py for a whole variant; admission.py applies the trust policy.
"""
