"""OCI registries as places for archives. It needs httpx, so import it only where a registry is used.

Start in registry.py; client.py sends the requests, auth.py and credentials.py log in.
"""

from ingot.model_store.registry.credentials import Credentials
from ingot.model_store.registry.registry import Registry
from ingot.model_store.registry.retries import Retries

__all__ = ["Credentials", "Registry", "Retries"]
