"""Causal attention of whole sequences, with gradients."""
