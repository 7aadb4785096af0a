"""Times of llamac's operations beside PyTorch's: `python -m llamac.bench`; dev/bench.py shares its parts."""
