"""Who holds which page of the cache. Plain Python: no jax, no arrays, no clock.

A page is free, used by one or more sequences, or cached: full, used by nobody, kept for a prompt that begins
the same way. Page 0 is scratch and never handed out.

A page gets its name as soon as its rows are being computed. Whether they are finite is known only when a
later token has been sampled. Until then the page can be shared while in use, but is not cached after its last
user leaves.

A page that is not free belongs to a key, that of the request which took it. Where a cached page must make
room, it is the least recently used one of the key that has most pages: a key that keeps to its equal share
loses no cached page to what others send, unless they need the room to run in. A key alone may have all.
"""

import dataclasses
import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Held:
    """What is known of a page that is not free.

    Attributes:
      key: whose it is. references: its owners; none if it is cached. name: None before it is full.
      vouched: what it holds is known to be sound.
    """

    key: str
    references: int
    name: bytes | None
    vouched: bool


class Pages:
    """Counts references to `count - 1` pages and keeps the contents of those that have a name.

    A name is a digest of a page's tokens and of all before it (`extend`); its tokens are kept beside it and
    compared on every hit, so that two prompts share rows only if they are the same.

    Attributes:
      owned: pages of each key, used or cached.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._references = [0] * count
        self._named: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self._name: dict[int, bytes] = {}
        self._unproven: set[int] = set()  # named, and nobody has vouched for them
        self._key: dict[int, str] = {}  # whose a page is
        self.owned: Counter[str] = Counter()
        self._cached: dict[str, OrderedDict[int, None]] = {}  # of each key, least recently used first

    @property
    def total(self) -> int:
        return self.count - 1

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

    def references(self, page: int) -> int:
        return self._references[page]

    def held(self) -> dict[int, Held]:
        """Every page that is not free."""
        return {page: self._held(page, key) for page, key in self._key.items()}

    def _held(self, page: int, key: str) -> Held:
        name = self._name.get(page)
        return Held(key, self._references[page], name, name is not None and page not in self._unproven)

    def allocate(self, n: int, key: str = "") -> list[int] | None:
        """`n` pages for one owner, a request of `key`'s; or None and nothing changes."""
        if n > self.available:
            return None
        out = []
        for _ in range(n):
            if not self._free:
                self.forget(self._least_needed(key))
            page = self._free.pop()
            self._references[page], self._key[page] = 1, key
            self.owned[key] += 1
            out.append(page)
        return out

    def _least_needed(self, asking: str) -> int:
        richest = max(self._cached, key=lambda key: (self.owned[key], key == asking))
        return next(iter(self._cached[richest]))

    def find(self, name: bytes, tokens: tuple[int, ...]) -> int | None:
        """The page of this name, if it holds exactly these tokens."""
        page, held = self._named.get(name, (None, ()))
        return page if held == tokens else None

    def share(self, page: int) -> None:
        """One more owner of a page that is used or cached.

        Raises:
          RuntimeError: it is free.
        """
        if page not in self._key:
            raise RuntimeError(f"page {page} is free: nothing in it can be shared")
        if not self._references[page]:
            self._uncache(page)
        self._references[page] += 1

    def name(self, page: int, name: bytes, tokens: tuple[int, ...]) -> None:
        """A used page is full of these tokens; the first page to take a name keeps it.

        Raises:
          RuntimeError: nobody uses it.
        """
        if not self._references[page]:
            raise RuntimeError(f"page {page} is used by nobody: what it holds cannot get a name")
        if name not in self._named and page not in self._name:
            self._named[name], self._name[page] = (page, tokens), name
            self._unproven.add(page)

    def vouch(self, pages: Iterable[int]) -> None:
        """What these hold was read to a good end: they may be kept."""
        self._unproven.difference_update(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page. Pages without references are cached if they were vouched for,
        else freed; the last of them are reused first.

        Raises:
          RuntimeError: one of them has no owner left.
        """
        for page in reversed(list(pages)):
            if not self._references[page]:
                raise RuntimeError(f"page {page} was given back by its last owner already")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._name and page not in self._unproven:
                self._cached.setdefault(self._key[page], OrderedDict())[page] = None
            else:
                self._unname(page)
                self._free_one(page)

    def forget(self, page: int) -> None:
        """Nobody will find this page by its name again; if it was cached it is free."""
        if self._unname(page) and not self._references[page]:
            self._uncache(page)
            self._free_one(page)

    def _unname(self, page: int) -> bool:
        """Whether it had a name."""
        self._unproven.discard(page)
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
