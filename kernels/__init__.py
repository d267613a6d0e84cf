"""Kernels by hand, one folder each; what they share is in common/. They import jax and jaxtyping only."""
