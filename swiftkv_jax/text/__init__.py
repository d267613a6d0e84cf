"""Texts and chats to token ids and back, trusting no folder that they are read from."""
