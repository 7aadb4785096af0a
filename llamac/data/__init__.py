"""Token files: reading them in the order in which training visits them, writing them, and making them from
text (`llamac data INPUT... --out DIR`). docs/training.md, "Your own text", is the user's page.
"""

from llamac.data.tokens import (
    HEADER_BYTES,
    Loader,
    Shard,
    check_tokens,
    find_documents,
    permute,
    read_bin,
    splitmix64,
    write_bin,
    write_shards,
)

__all__ = [
    "HEADER_BYTES",
    "Loader",
    "Shard",
    "check_tokens",
    "find_documents",
    "permute",
    "read_bin",
    "splitmix64",
    "write_bin",
    "write_shards",
]
