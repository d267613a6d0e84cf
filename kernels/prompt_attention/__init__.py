"""Causal attention of whole prompts, from their first token on, over dense keys and values (no pages)."""
