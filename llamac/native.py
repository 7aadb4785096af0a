"""Loads llamac._native, as `native`."""

import os

# libgomp's idle threads spin before they sleep, by default for so long that programs on the same cores mostly
# wait for each other. It reads this when it is loaded; child processes are not to inherit it.
_ours = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
if _ours:
    os.environ["GOMP_SPINCOUNT"] = "5000"  # as train_llama3 does
try:
    from llamac import _native as native
finally:
    if _ours:
        del os.environ["GOMP_SPINCOUNT"]

__all__ = ["native"]
