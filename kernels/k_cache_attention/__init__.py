"""Attention that reads keys (or layer inputs) and never values: Slim attention."""
