"""Checkpoints: Meta's files, Hugging Face's files, and those of a training run."""
