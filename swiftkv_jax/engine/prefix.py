"""Names of full pages: a SHA-256 chain. Plain Python: no jax, no arrays, no clock."""

import hashlib
import struct
from collections.abc import Sequence


def root(*parts: str) -> bytes:
    """Where a chain begins: what makes rows different though tokens are equal.

    The model's fingerprint, its plan, the cache's dtype and page size, and the tenant's salt; each is written
    with its length, so that no two lists of parts run together.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page of `tokens` that follows the page named `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
