"""Causal attention of whole prompts, from their first token on: keys and values at hand, no pages."""
