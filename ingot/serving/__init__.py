"""What a server serves: the models under their names, and how new versions take over.

Start in repository.py; rollout.py changes what is served, by takeover.py for one model, and deployment.py is one name
and version over time.
"""

from ingot.serving.catalog import Catalog, ServedModel
from ingot.serving.repository import Repository

__all__ = ["Catalog", "Repository", "ServedModel"]
