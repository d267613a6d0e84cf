"""Training data: files, documents, samples, packing, batches."""

from swiftkv_jax.distill.data.samples import DataConfig

__all__ = ["DataConfig"]
