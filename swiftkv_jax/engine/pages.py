"""Who holds which page of the cache. Plain Python: no jax, no arrays, no clock.

A page is free, used by one or more sequences, or cached: full, used by nobody, kept for a prompt that begins
the same way. Page 0 is scratch and never handed out.
"""

from collections import OrderedDict
from collections.abc import Iterable


class Pages:
    """Counts references to `count - 1` pages and keeps the contents of those that have a name.

    A name is a digest of a page's tokens and of all before it (prefix.py); its tokens are kept beside it and
    compared on every hit, so that two prompts share rows only if they are the same.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._references = [0] * count
        self._named: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self._name: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def total(self) -> int:
        return self.count - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones, whose contents are then forgotten."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages for one owner, or None and nothing changes."""
        if n > self.available:
            return None
        out = []
        for _ in range(n):
            if not self._free:
                self.forget(next(iter(self._cached)))
            page = self._free.pop()
            self._references[page] = 1
            out.append(page)
        return out

    def find(self, name: bytes, tokens: tuple[int, ...]) -> int | None:
        """The page of this name, if it holds exactly these tokens."""
        page, held = self._named.get(name, (None, ()))
        return page if held == tokens else None

    def share(self, page: int) -> None:
        """One more owner of a page that is used or cached."""
        assert self._references[page] or page in self._cached
        self._references[page] += 1
        self._cached.pop(page, None)

    def name(self, page: int, name: bytes, tokens: tuple[int, ...]) -> None:
        """A used page is full of these tokens; the first page to take a name keeps it."""
        assert self._references[page]
        if name not in self._named and page not in self._name:
            self._named[name], self._name[page] = (page, tokens), name

    def release(self, pages: Iterable[int]) -> None:
        """One owner less of each; the last of them are the first to be reused."""
        for page in reversed(list(pages)):
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._name:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget(self, page: int) -> None:
        """Nobody will find this page by its name again; if it was cached it is free."""
        name = self._name.pop(page, None)
        if name is not None:
            del self._named[name]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)
