"""llamac: Llama 3 training in C/HIP, and its operations for PyTorch.

The modules config, random, schedule, options, data, tokenizer, log and plot need neither torch nor the
compiled extension; import them by name (`from llamac.data import Loader`).
"""

__version__ = "0.1.0"
