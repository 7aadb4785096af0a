"""`llamac bench` times llamac's and PyTorch's operations; dev/bench.py shares its parts."""
