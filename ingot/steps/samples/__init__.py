"""Raw inputs on which an export proves steps, besides those of ``images/pictures.py`` and ``sounds/synthesis.py``."""
