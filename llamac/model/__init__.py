"""Configurations, the table of the block, Hugging Face's files of weights, and checkpoints."""
