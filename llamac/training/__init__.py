"""The parts of train_llama3.py besides the model, AdamW and the loop: the parts of weights that a process
holds, several devices, llamac's operations, stochastic rounding, reference files, and a run's data and log.

These modules access the model by its structure (`model.model.layers`, …) and do not import train_llama3.py.
"""
