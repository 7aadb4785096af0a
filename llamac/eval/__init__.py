"""Evaluation of models: multiple-choice questions, and bits per byte of texts. `llamac eval`."""
