"""Checkpoints: Hugging Face folders in and out, and the state of a training run."""
