"""Texts of decoders: prompts of messages (``chat_template``), tokens as text (``detokenizer``), and stop texts.

Start in texts.py, which opens what an archive has of them.
"""
