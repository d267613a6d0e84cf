"""Ownership of the cache's pages. Plain Python: no jax, no arrays, no clock.

A page is free, in use by one or more sequences, or cached: full, without a user, and kept for a later prompt
with the same prefix. Page 0 is the scratch page and is never allocated.

A page gets its name as soon as its rows are being computed. Whether they are finite is known only when a
later token has been sampled. Until then the page can be shared while in use, but is not cached after its last
user leaves.

Every page that is not free belongs to the key (tenant) of the request that allocated it. When a cached page
must be evicted, it is the least recently used one of the key with the most pages. A key within its equal
share therefore loses no cached page to the requests of others, unless they need the room to run. A single key
may use all pages.
"""

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class Pages:
    """Counts references to `count - 1` pages and keeps the contents of those that have a name.

    A name is a digest of a page's tokens and of all before it (`extend`); its tokens are kept beside it and
    compared on every hit, so that two prompts share rows only if they are the same.

    Attributes:
      total: pages to allocate. references: users of each page. owned: pages of each key, used or cached.
    """

    def __init__(self, count: int):
        self.total = count - 1
        self._free = list(range(count - 1, 0, -1))
        self.references = [0] * count
        self._named: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self._name: dict[int, bytes] = {}
        self._unvalidated: set[int] = set()  # named, contents not yet verified
        self._key: dict[int, str] = {}  # page -> the key it belongs to
        self.owned: Counter[str] = Counter()
        self._cached: dict[str, OrderedDict[int, None]] = {}  # by key, least recently used first

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones, whose contents are then forgotten."""
        return len(self._free) + self.cached

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        return sum(map(len, self._cached.values()))

    def allocate(self, n: int, key: str = "") -> list[int] | None:
        """Allocate `n` pages for one owner, a request of `key`. If there are too few, return None and change
        nothing."""
        if n > self.available:
            return None
        out = []
        for _ in range(n):
            if not self._free:
                richest = max(self._cached, key=lambda each: (self.owned[each], each == key))
                self.forget(next(iter(self._cached[richest])))
            page = self._free.pop()
            self.references[page], self._key[page] = 1, key
            self.owned[key] += 1
            out.append(page)
        return out

    def find(self, name: bytes, tokens: tuple[int, ...]) -> int | None:
        """The page of this name, if it holds exactly these tokens."""
        page, known = self._named.get(name, (None, ()))
        return page if known == tokens else None

    def share(self, page: int) -> None:
        """Add an owner to a page that is in use or cached."""
        if page not in self._key:
            raise RuntimeError(f"page {page} is free: nothing in it can be shared")
        if not self.references[page]:
            self._uncache(page)
        self.references[page] += 1

    def name(self, page: int, name: bytes, tokens: tuple[int, ...]) -> None:
        """Name a page in use that is now full of these tokens. The first page to take a name keeps it."""
        if not self.references[page]:
            raise RuntimeError(f"page {page} is used by nobody: what it holds cannot get a name")
        if name not in self._named and page not in self._name:
            self._named[name], self._name[page] = (page, tokens), name
            self._unvalidated.add(page)

    def validate(self, pages: Iterable[int]) -> None:
        """Mark the contents of these pages as verified, so that they may be cached."""
        self._unvalidated.difference_update(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page. Pages without references are cached if verified, else freed; the
        last pages are reused first.
        """
        for page in reversed(list(pages)):
            if not self.references[page]:
                raise RuntimeError(f"page {page} was given back by its last owner already")
            self.references[page] -= 1
            if self.references[page]:
                continue
            if page in self._name and page not in self._unvalidated:
                self._cached.setdefault(self._key[page], OrderedDict())[page] = None
            else:
                self._unname(page)
                self._free_one(page)

    def forget(self, page: int) -> None:
        """Drop the page's name, so that it is never found again; a cached page becomes free."""
        if self._unname(page) and not self.references[page]:
            self._uncache(page)
            self._free_one(page)

    def _unname(self, page: int) -> bool:
        """Drop the page's name; return whether it had one."""
        self._unvalidated.discard(page)
        name = self._name.pop(page, None)
        if name is not None:
            del self._named[name]
        return name is not None

    def _uncache(self, page: int) -> None:
        line = self._cached[self._key[page]]
        del line[page]
        if not line:
            del self._cached[self._key[page]]

    def _free_one(self, page: int) -> None:
        key = self._key.pop(page)
        self.owned[key] -= 1
        if not self.owned[key]:
            del self.owned[key]
        self._free.append(page)


def root(*parts: str) -> bytes:
    """The start of a chain of page names: a digest of what makes rows differ although tokens are equal.

    The parts are the model's fingerprint, its plan, the cache's dtype and page size, and the tenant's salt.
    Each is written with its length, so that no two lists of parts give the same bytes.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page of `tokens` that follows the page named `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
