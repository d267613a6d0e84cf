"""Gated MLPs of which each token runs some."""
