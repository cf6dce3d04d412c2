"""Texts of decoders: prompts of messages (``chat_template``), tokens as text (``detokenizer``), their end (``stops``)."""
