"""Prefix affinity: a prompt goes to the replica that has read its beginning, unless too much waits there.

Plain Python: no Ray, no clock. Prompts get names by the hash chain that names pages of the cache
(engine/pages.py), but over text instead of tokens, so that no tokenizer is needed in front of the replicas.
"""

import hashlib
import json
import random
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from swiftkv_jax.engine import pages

PAGES = 64  # the most pages of a prompt that are named
CHARACTERS = 4  # bytes of text per token, about
SLACK = 8  # requests that a replica may have more than the least busy one and still be preferred
KNOWN = 100_000  # names that are remembered
_SHARE = 0.5  # of a prompt's named pages that must be known, so that a common system prompt is not enough


def names(body: bytes, tenant: bytes, page_size: int) -> list[bytes]:
    """The names of a request's first full pages; empty if it has none or cannot be parsed.

    Args:
      body: JSON, as of `/v1/completions` or `/v1/chat/completions`.
      tenant: the header with the caller's key; keys share no pages.
      page_size: tokens of a page; of text, `CHARACTERS` times as many bytes.
    """
    try:
        fields = json.loads(body)
        prompt = fields["messages"] if "messages" in fields else fields["prompt"]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            units, size = prompt, page_size
        else:
            text = prompt if isinstance(prompt, str) else json.dumps(prompt)
            units, size = text.encode(), page_size * CHARACTERS
        out, name = [], pages.root(tenant.decode("latin-1"))
        for start in range(0, min(len(units) - size + 1, PAGES * size), size):
            name = pages.extend(name, units[start : start + size])
            out.append(name)
        return out
    except (ValueError, TypeError, KeyError, RecursionError, struct.error):
        return []  # the replica says what is wrong with it


class Affinity:
    """Remembers which replica has read which beginnings, the latest `KNOWN` of them."""

    def __init__(self):
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def order(self, named: Sequence[bytes], busy: Mapping[str, int]) -> list[str]:
        """The replicas in order of preference: the prompt's own if it has one, then the least busy.

        Args:
          named: the prompt's names.
          busy: replica -> requests that it has.
        """
        least = sorted(busy, key=lambda replica: (busy[replica], _lot(named, replica)))
        home = self._home(named, busy)
        if home is None or busy[home] - busy[least[0]] >= SLACK:
            return least
        return [home, *(replica for replica in least if replica != home)]

    def read(self, named: Sequence[bytes], replica: str, alive: Mapping[str, object]) -> None:
        """Record that `replica` reads a prompt. A beginning that another living replica has read stays with
        that one."""
        for name in named:
            if self._homes.get(name) not in alive:
                self._homes[name] = replica
            self._homes.move_to_end(name)
        while len(self._homes) > KNOWN:
            self._homes.popitem(last=False)

    def _home(self, named: Sequence[bytes], alive: Mapping[str, object]) -> str | None:
        """The replica that has read the longest beginning of a prompt, if that is long enough."""
        for count in range(len(named), 0, -1):
            home = self._homes.get(named[count - 1])
            if home in alive:
                return home if count >= _SHARE * len(named) else None
        return None


def _lot(named: Sequence[bytes], replica: str) -> bytes:
    """A tie-breaker: by the prompt's beginning, so that several routers agree; random without one."""
    return hashlib.sha256(named[0] + replica.encode()).digest() if named else random.randbytes(8)
