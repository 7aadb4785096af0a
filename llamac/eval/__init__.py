"""Evaluation of models: multiple-choice questions, and bits per byte of texts. `python -m llamac.eval`."""
