"""`llamac bench` times llamac's and PyTorch's operations; the benchmarks of dev/ share its parts."""
