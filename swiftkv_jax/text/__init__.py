"""Texts and chats to token ids and back; model folders are treated as untrusted."""
