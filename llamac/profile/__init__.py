"""Profiles: reports, PyTorch's profiler, measured and published rates."""
