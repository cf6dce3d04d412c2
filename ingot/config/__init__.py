"""The settings of a server and its models: where they are stated, and how they are read.

``server_fields.py`` and ``model_fields.py`` state them; ``ServerConfig`` reads and checks them. ``file.py`` reads
``ingot.toml``, ``configuration.py`` combines it with options and variables, and ``changes.py`` compares two
configurations.
"""

from ingot.config.server import CLIENT_LIMITS, ServerConfig

__all__ = ["CLIENT_LIMITS", "ServerConfig"]
