"""Kernels by hand, one folder each; they import jax and nothing else of this library."""
