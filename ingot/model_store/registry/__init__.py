"""OCI registries as places for archives. It imports httpx, so it is imported only where a registry is meant."""

from ingot.model_store.registry.credentials import Credentials
from ingot.model_store.registry.registry import Registry
from ingot.model_store.registry.retries import Retries

__all__ = ["Credentials", "Registry", "Retries"]
