"""Hand-written kernels, one folder each; shared code is in common/. They import jax and jaxtyping only."""
