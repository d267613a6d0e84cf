"""What a model is, as data: plan, shape, families, and the readers of config.json and GGUF."""

from swiftkv_jax.config.model import ModelConfig

__all__ = ["ModelConfig"]
