"""Distillation: data, loss, step and the loop around them."""
