"""The page allocator under random traffic, and the names of pages."""

import itertools
import random
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from swiftkv_jax.engine.pages import Pages, extend, root

COUNT = 13


class Traffic(RuleBasedStateMachine):
    """Owners take, name, share and release pages; a plain model says who holds what."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self.pages = Pages(COUNT)
        self.held: dict[int, list[int]] = {}
        self.validated: set[int] = set()
        self.next = 0

    def _own(self, pages: list[int]) -> int:
        self.next += 1
        self.held[self.next] = pages
        return self.next

    @rule(target=owners, n=st.integers(0, COUNT), key=st.sampled_from(("", "a", "b")))
    def allocate(self, n, key):
        before = {p for pages in self.held.values() for p in pages}
        got = self.pages.allocate(n, key)
        if n > COUNT - 1 - len(before):
            assert got is None
            return self._own([])
        assert got is not None and len(set(got)) == n
        assert not set(got) & before and 0 not in got  # nobody else's, and never the scratch page
        self.validated -= set(got)
        return self._own(got)

    @rule(owner=owners, name=st.integers(0, 5))
    def name(self, owner, name):
        for page in self.held.get(owner, [])[:1]:
            self.pages.name(page, bytes([name]), (name,))

    @rule(owner=owners)
    def validate(self, owner):
        self.pages.validate(self.held.get(owner, []))
        self.validated |= set(self.held.get(owner, [])) & self.pages._name.keys()

    @rule(target=owners, name=st.integers(0, 5))
    def share(self, name):
        page = self.pages.find(bytes([name]), (name,))
        if page is None:
            return self._own([])
        self.pages.share(page)
        return self._own([page])

    @rule(owner=consumes(owners))
    def release(self, owner):
        self.pages.release(self.held.pop(owner, []))

    @rule(owner=owners)
    def forget(self, owner):
        for page in self.held.get(owner, []):
            self.pages.forget(page)
            self.validated.discard(page)

    @invariant()
    def books_balance(self):
        pages, flat = self.pages, [p for held in self.held.values() for p in held]
        assert all(pages.references[p] == flat.count(p) for p in range(COUNT))
        assert pages.used == len(set(flat)) and pages.total == COUNT - 1
        cached, named = {page for page in pages._key if not pages.references[page]}, pages._name
        assert set(pages._key) == cached | set(flat) <= set(range(1, COUNT)) and len(cached) == pages.cached
        assert cached <= self.validated, "kept, and nobody has validated for it"
        assert self.validated - cached <= set(flat), "validated for, and not kept"
        assert set(named) - pages._unvalidated == self.validated
        owned = Counter(pages._key.values())
        assert all(pages.owned[key] == owned[key] for key in ("", "a", "b"))
        assert {pages.find(name, (*name,)): name for name in named.values()} == named
        found = (pages.find(bytes([name]), (name,)) for name in range(6))
        assert {page for page in found if page is not None} == set(named)

    def teardown(self):
        for held in self.held.values():
            self.pages.release(held)
        assert self.pages.available == self.pages.total
        assert sorted(self.pages.allocate(COUNT - 1) or ()) == list(range(1, COUNT)), "free once each"


TestTraffic = Traffic.TestCase
TestTraffic.settings = hypothesis.settings(max_examples=40, stateful_step_count=100, deadline=None)


@pytest.mark.soak
def test_page_references_balance_over_forty_thousand_steps():
    settings = hypothesis.settings(max_examples=400, stateful_step_count=100, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(Traffic, settings=settings)


def test_the_least_recently_used_contents_go_first_and_tails_before_heads():
    pages = Pages(5)
    first, second = pages.allocate(2), pages.allocate(2)
    for owner in (first, second):
        for i, page in enumerate(owner):
            pages.name(page, bytes([page]), (i,))
        pages.validate(owner)
    pages.release(first)
    pages.release(second)
    pages.share(first[0])  # used again
    pages.release(first[:1])
    gone = [pages.allocate(1)[0] for _ in range(4)]
    assert gone == [first[1], second[1], second[0], first[0]]


def keep(pages: Pages, key: str, count: int, made: itertools.count) -> list[bytes]:
    """`count` pages of a key's, one after the other, full and no longer used; their names."""
    names = [b"%d" % next(made) for _ in range(count)]
    for name in names:
        (page,) = pages.allocate(1, key)
        pages.name(page, name, (1,))
        pages.validate([page])
        pages.release([page])
    return names


def left(pages: Pages, names: list[bytes]) -> int:
    return sum(pages.find(name, (1,)) is not None for name in names)


def test_a_key_that_floods_the_cache_loses_its_own_pages():
    """A key within its equal share loses nothing, one above it makes room, and a single key may have all."""
    pages, made = Pages(13), itertools.count()
    first = keep(pages, "greedy", 12, made)
    assert left(pages, first) == 12
    modest = keep(pages, "modest", 3, made)
    assert left(pages, first) == 9 and left(pages, modest) == 3
    keep(pages, "greedy", 500, made)
    assert left(pages, modest) == 3 and pages.owned["greedy"] == 9
    equal = keep(pages, "late", 500, made)  # from the greedy one until both have as much
    assert left(pages, modest) == 3 and left(pages, equal) == pages.owned["late"] in (4, 5)
    running = pages.allocate(6, "late")  # its own first, then in turn: what runs comes before what is kept
    assert left(pages, equal) == 0 and left(pages, modest) == 3 and pages.owned["greedy"] == 3
    assert pages.allocate(7, "late") is None and left(pages, modest) == 3
    pages.release(running)
    assert pages.allocate(12, "late") is not None and not left(pages, modest) and pages.owned["late"] == 12


@hypothesis.given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=60))
def test_no_key_within_its_equal_share_loses_a_page_to_another(turns):
    """Keys fill pages in any order: with 12 pages for three keys nobody is pushed below four."""
    pages, made = Pages(13), itertools.count()
    kept: dict[str, list[bytes]] = {key: [] for key in "abc"}
    for key, count in turns:
        kept[key] += keep(pages, key, count, made)
        for each, names in kept.items():
            now = left(pages, names)
            assert now >= min(len(names), 4) and now == pages.owned[each]


def test_unvalidated_pages_are_shared_while_in_use_and_not_cached_afterwards():
    """A hit needs the tokens, not only the name."""
    pages = Pages(3)
    (page,) = pages.allocate(1)
    pages.name(page, b"x", (1,))
    assert pages.find(b"x", (1,)) == page and pages.find(b"x", (2,)) is None, "others may begin with it"
    pages.share(page)
    pages.release([page])
    assert pages.find(b"x", (1,)) == page
    pages.release([page])
    assert pages.find(b"x", (1,)) is None and pages.cached == 0 and pages.available == 2
    (again,) = pages.allocate(1)
    assert again == page
    pages.name(page, b"x", (1,))
    pages.validate([page])
    pages.release([page])
    assert pages.find(b"x", (1,)) == page and pages.cached == 1


@hypothesis.given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_page_chain_roots_differ_unless_all_parts_are_equal(a, b):
    assert (root(*a) == root(*b)) == (a == b)


@hypothesis.given(
    *[st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), min_size=1, max_size=9))] * 2
)
def test_names_tell_chains_and_tenants_apart(a, b):
    def chain(tenant, tokens):
        name = root("model", tenant)
        for i in range(0, len(tokens), 2):
            name = extend(name, tokens[i : i + 2])
        return name

    assert (chain(*a) == chain(*b)) == (a == b)


@pytest.mark.parametrize("lookups", [10_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_no_tenant_finds_anothers_page(lookups):
    """Prompts of few tokens, so that equal ones abound; pages named for one tenant are found by no other."""
    source, pages, size = random.Random(3), Pages(400), 4
    owner: dict[int, int] = {}
    same = others = 0
    for _ in range(lookups):
        tenant, salt = source.randrange(8), source.choice(("", "a"))
        parent = root("model", "float32", str(size), f"{tenant:064x}:{salt}")
        identity = 2 * tenant + bool(salt)
        for _ in range(source.randint(1, 4)):
            tokens = tuple(source.randrange(2) for _ in range(size))
            parent = extend(parent, tokens)
            page = pages.find(parent, tokens)
            if page is not None:
                same += owner[page] == identity
                others += owner[page] != identity
                continue
            (page,) = pages.allocate(1) or (None,)
            assert page is not None
            pages.name(page, parent, tokens)
            pages.validate([page])
            owner[page] = identity
            pages.release([page])
    assert others == 0 and same > lookups // 4


def test_invalid_use_of_a_page_without_an_owner_is_refused():
    """The checks are no `assert` statements, which `tests/test_architecture.py` forbids."""
    pages = Pages(4)
    (page,) = pages.allocate(1) or ()
    pages.release([page])
    wrong = (lambda: pages.release([page]), lambda: pages.share(page), lambda: pages.release([0]))
    for use in (*wrong, lambda: pages.name(page, b"x", (1,))):
        with pytest.raises(RuntimeError):
            use()
    assert pages.available == pages.total == 3 and pages.find(b"x", (1,)) is None
