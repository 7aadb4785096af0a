"""How good a model is: multiple-choice questions and bits per byte of texts. `python -m llamac.eval`."""
