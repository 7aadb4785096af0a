"""llamac's differentiable operations for PyTorch models; `help(llamac.ops.operations)` describes them."""

from llamac.ops.operations import *  # noqa: F403
from llamac.ops.operations import __all__, cis_of_frequencies  # noqa: F401
