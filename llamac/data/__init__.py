"""Token files: reading them in the order in which training visits them, writing them, and making them from
text (`llamac data INPUT... --out DIR`). docs/training.md, "Your own text", is the user's page.
"""

from llamac.data.tokens import Loader, find_documents, permute, read_bin, write_bin

__all__ = ["Loader", "find_documents", "permute", "read_bin", "write_bin"]
