"""Profiles: reports, PyTorch's profiler, counters of GPUs, measured and published rates, FLOPs."""
