"""How models are run: the settings, and the files and texts that they name. Start in settings.py."""
