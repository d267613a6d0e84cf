"""The scheduler under random traffic: every token runs once, in order, within the budget; pages balance."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from swiftkv_jax.engine.pages import Pages, root
from swiftkv_jax.engine.queue import Demand, Queue
from swiftkv_jax.engine.request import Request, SamplingParams
from swiftkv_jax.engine.scheduler import Scheduler, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence

PAGE = 4


def sequence(prompt, output: int, number: int = 0, **fields) -> Sequence:
    params = dataclasses.replace(SamplingParams(), max_tokens=output, seed=0)
    tokens = (5,) * prompt if isinstance(prompt, int) else tuple(prompt)
    request = Request(prompt=None, token_ids=tokens, params=params, root=root("m"), **fields)
    return Sequence(request, 0, None, 0.0, number)


def next_token(tokens: list[int]) -> int:
    """A model of sorts: what follows depends on everything before."""
    return hash(tuple(tokens)) % 3


class Traffic(RuleBasedStateMachine):
    """Requests that often begin alike come, run, decode in loops, are cancelled; pages are scarce.

    What each page holds is modelled beside the scheduler: a sequence must find its own tokens in its pages.
    """

    arrivals = Bundle("arrivals")
    tail: int | None = None  # of a prompt, with an auxiliary model that reads what comes before

    def __init__(self):
        super().__init__()
        self.pages = Pages(13)
        self.scheduler = Scheduler(self.pages, PAGE, lanes=3, budget=10)
        self.holds: dict[int, list] = {}
        self.proven: set[int] = set()  # pages after whose tokens one was sampled
        self.count = 0
        self.everyone: list[Sequence] = []

    @rule(
        target=arrivals,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        output=st.integers(1, 12),
        priority=st.integers(0, 1),
        key=st.sampled_from("ab"),
    )
    def arrives(self, prompt, output, priority, key):
        return self.arrive(prompt, output, priority, key)

    def arrive(self, prompt, output, priority, key):
        ahead = None if self.tail is None else max(0, len(prompt) - self.tail)
        one = sequence(prompt, output, self.count, priority=priority, key=key, ahead=ahead)
        self.count += 1
        self.everyone.append(one)
        self.scheduler.add(one)
        return one

    @rule(target=arrivals, other=arrivals, more=st.lists(st.integers(0, 2), max_size=3))
    def follow_up(self, other, more):
        """A prompt that goes on from what another sequence has, generated tokens included, even right now."""
        return self.arrive([*other.tokens, *more][:20], 6, 0, "a")

    @rule(one=arrivals)
    def cancel(self, one):
        if not one.finish_reason:
            one.end("abort", 0.0)
            self.scheduler.remove(one)

    @staticmethod
    def _rows(one: Sequence, start: int, stop: int) -> list[tuple[int, bool]]:
        """Each token with whether the auxiliary made its row."""
        ahead = one.request.ahead or 0
        return [(t, at < ahead) for at, t in enumerate(one.slice(start, stop), start)]

    def _write(self, one: Sequence, start: int, stop: int) -> None:
        for at, token in zip(range(start, stop), self._rows(one, start, stop), strict=True):
            page = one.pages[at // PAGE]
            assert self.pages.references[page] == 1, "a shared page is never written"
            self.holds.setdefault(page, [None] * PAGE)[at % PAGE] = token
            self.proven.discard(page)

    def _check(self, one: Sequence) -> None:
        held = [self.holds[one.pages[at // PAGE]][at % PAGE] for at in range(one.cached)]
        assert held == self._rows(one, 0, one.cached)

    def _sample(self, one: Sequence) -> None:
        one.append(Choice(next_token(one.tokens)), 0.0)
        self.scheduler.mark_finite(one)
        self.proven |= set(one.pages)
        if one.finish_reason:
            self.scheduler.remove(one)

    @rule()
    def step(self):
        for one in self.scheduler.admit():
            self._check(one)  # what it shares is what it would have computed
        work, size = self.scheduler.plan()
        assert sum(item.count for item in work) <= size <= 10
        assert len({id(item.sequence) for item in work}) == len(work)
        assert bool(work) == bool(self.scheduler.running)
        for item in work:
            one = item.sequence
            assert 1 <= item.count <= one.pending and one.lane is not None
            rows = self._rows(one, one.cached, one.cached + item.count)
            assert [made for _, made in rows] == [i < item.ahead for i in range(item.count)]
            self._write(one, one.cached, one.cached + item.count)
            completes = item.completes
            self.scheduler.cached(one, item.count)
            self._check(one)
            if completes:
                self._sample(one)

    @rule(steps=st.integers(1, 6))
    def loop(self, steps):
        if self.scheduler.reading:
            return
        for one in self.scheduler.in_order():
            if one.lane is not None:
                self.scheduler.grow(one, min(one.length + steps - 1, one.request.max_length))
        for one in self.scheduler.in_order():
            for _ in range(steps):
                if not one.finish_reason:
                    self._write(one, one.cached, one.cached + 1)
                    self.scheduler.cached(one, 1)
                    self._sample(one)

    @invariant()
    def books_balance(self):
        running = list(self.scheduler.running.values())
        flat = [page for one in running for page in one.pages]
        assert len(set(flat)) == self.pages.used
        assert all(self.pages.references[page] == flat.count(page) for page in set(flat))
        cached = {page for page in self.pages._key if not self.pages.references[page]}
        assert len(cached) == self.pages.cached and cached <= self.proven, (
            "kept, though nobody has sampled a token after it"
        )
        for key in "ab":
            line = [one for one in self.scheduler.waiting if one.request.key == key]
            left = sum(one.request.params.max_tokens - len(one.output) for one in line)
            want = Demand(len(line), sum(one.length for one in line), left)
            assert self.scheduler.waiting.demands.get(key, Demand()) == want
        assert self.scheduler.waiting.demand.sequences == len(self.scheduler.waiting)
        assert all(not one.pages and not one.cached for one in self.scheduler.waiting)
        assert all(one.lane == lane for lane, one in self.scheduler.running.items())
        going = [one for one in self.everyone if not one.finish_reason]
        assert len(going) == len(running) + len(self.scheduler.waiting), "nobody is lost"
        for one in running:
            assert one.cached <= len(one.pages) * PAGE and not one.finish_reason

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.busy:
                break
            self.step()
        assert not self.scheduler.busy
        assert self.pages.available == self.pages.total
        for _ in range(4):
            self.scheduler.add(sequence(1, 1))
        assert sorted(one.lane for one in self.scheduler.admit()) == [0, 1, 2], "every lane is free again"
        for one in self.everyone:
            tokens = list(one.request.token_ids)
            for _ in one.output:
                tokens.append(next_token(tokens))
            assert one.tokens == tokens  # preempted or not, shared or not
            assert one.finish_reason in ("length", "abort")


TestTraffic = Traffic.TestCase
TestTraffic.settings = hypothesis.settings(max_examples=25, stateful_step_count=60, deadline=None)


class PredictedTraffic(Traffic):
    """Traffic with an auxiliary: no row of the base's own may stand where the auxiliary's should be, or the
    other way round. Preempted sequences are read again by the same rule."""

    tail = 2


TestPredictedTraffic = PredictedTraffic.TestCase
TestPredictedTraffic.settings = hypothesis.settings(max_examples=12, stateful_step_count=60, deadline=None)


@pytest.mark.soak
@pytest.mark.parametrize("traffic", [Traffic, PredictedTraffic])
def test_twenty_thousand_steps(traffic):
    settings = hypothesis.settings(max_examples=400, stateful_step_count=60, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(traffic, settings=settings)


@pytest.mark.parametrize("budget", [64, 100, 2048])
def test_launches_are_few_sizes_with_little_padding(budget):
    sizes = {launch_size(pending, budget) for pending in range(1, 5000)}
    assert len(sizes) <= 8
    for pending in range(129, budget + 1):
        taken = min(pending, launch_size(pending, budget))
        assert 4 * taken >= 3 * launch_size(pending, budget)


@pytest.mark.slow
@hypothesis.given(
    decoding=st.integers(0, 300),
    guesses=st.integers(0, 10),
    prompts=st.lists(st.integers(1, 400), max_size=3),
    budget=st.sampled_from([512, 1100, 2048]),
)
def test_a_step_fits_every_decoding_sequence_and_a_token_of_a_prompt(decoding, guesses, prompts, budget):
    """The arrays have a size that a warm-up compiles."""
    scheduler = Scheduler(Pages(1 << 14), PAGE, lanes=320, budget=budget)
    for number, prompt in enumerate([1] * decoding + prompts):
        scheduler.add(sequence(prompt, 40, number))
    scheduler.admit()
    deciding = scheduler.in_order()[:decoding]
    for one in deciding:
        scheduler.cached(one, 1)
        one.append(Choice(1), 0.0)
    work, size = scheduler.plan(lambda one, most: (0,) * min(guesses, most))
    used = sum(item.count + len(item.draft) for item in work)
    assert used <= size and size in sizes_compiled(budget)
    assert {item.sequence for item in work} >= set(deciding[: budget // (1 + guesses)])
    assert not prompts or used == budget or any(item.sequence not in deciding for item in work)


def sizes_compiled(budget: int) -> set[int]:
    return {launch_size(n, budget) for n in range(1, budget + 1)} | {budget}


def test_decoding_goes_before_prompts_and_chunks_end_with_pages():
    scheduler = Scheduler(Pages(100), PAGE, lanes=4, budget=32)
    first, second = sequence(5, 9, 0), sequence(90, 9, 1)
    for one in (first, second):
        scheduler.add(one)
    scheduler.admit()
    work, size = scheduler.plan()
    assert [(item.sequence, item.count) for item in work] == [(first, 5), (second, 24)] and size == 32
    for item in work:
        scheduler.cached(item.sequence, item.count)
    first.append(Choice(1), 0.0)
    work, _ = scheduler.plan()
    assert [(item.sequence, item.count) for item in work] == [(first, 1), (second, 28)]


def test_keys_take_turns_whatever_their_number_of_requests():
    queue, order = Queue(), []
    for number in range(8):
        queue.push(sequence(10, 1, number, key="many"))
    for number in range(8, 10):
        queue.push(sequence(10, 1, number, key="few"))
    queue.push(sequence(10, 1, 10, key="many", priority=-1))
    while one := queue.head({}):
        queue.take(one)
        one.cached = one.length
        queue.charge(one)
        order.append(one.number)
    assert order[0] == 10  # the most urgent first
    assert set(order[1:5]) == {0, 1, 8, 9} and order[5:] == [2, 3, 4, 5, 6, 7]


def decode(scheduler: Scheduler, steps: int) -> None:
    """So many steps of a model that answers at once: prompts are read, and everybody decodes."""
    for _ in range(steps):
        scheduler.admit()
        for item in scheduler.plan()[0]:
            one, completes = item.sequence, item.completes
            scheduler.cached(one, item.count)
            if completes:
                one.append(Choice(1), 0.0)
                scheduler.mark_finite(one)
                if one.finish_reason:
                    scheduler.remove(one)


def test_generated_tokens_are_charged_to_the_key_that_asked_for_them():
    """One key sends prompts of 1 token and takes 40, the other sends 40 and takes 1: each has half of the
    tokens, in one lane, where prompts alone are charged the first has 20 answers for each of the other's."""
    scheduler = Scheduler(Pages(100), PAGE, lanes=1, budget=64)
    writer = [sequence(1, 40, number, key="writer") for number in range(40)]
    reader = [sequence(range(i, i + 40), 1, i, key="reader") for i in range(40, 80)]
    for one in writer + reader:
        scheduler.add(one)
    decode(scheduler, 700)
    done = [sum(one.finish_reason == "length" for one in each) for each in (writer, reader)]
    assert done[0] > 10 and abs(done[0] - done[1]) <= 1, done


def test_a_key_without_a_lane_gets_one_from_the_key_that_has_most():
    """It gets the lane at the next step, whatever the others still have to generate; no key is left out."""
    scheduler = Scheduler(Pages(400), PAGE, lanes=4, budget=64)
    flood = [sequence(3, 200, number, key="flood") for number in range(12)]
    for one in flood:
        scheduler.add(one)
    decode(scheduler, 5)
    assert len(scheduler.running) == 4 and scheduler.preemptions == 0
    short = [sequence(20, 4, number, key=f"key {number}") for number in (20, 21)]
    for one in short:
        scheduler.add(one)
    decode(scheduler, 4)
    assert [len(one.output) for one in short] == [4, 4] and scheduler.preemptions == 2
    decode(scheduler, 1)
    assert [one.number for one in scheduler.in_order()] == [0, 1, 2, 3], "the preempted go on first"
    more = [sequence(3, 200, number, key=f"key {number}") for number in range(30, 36)]
    for one in more:
        scheduler.add(one)
    decode(scheduler, 50)
    assert {one.request.key for one in scheduler.in_order()} == {"flood", "key 30", "key 31", "key 32"}
    assert scheduler.preemptions == 5, "who has one lane keeps it"


def test_a_key_that_fills_the_cache_makes_room_for_one_that_has_nothing():
    """Pages as well as lanes: the flood has 32 of 40, and the other's prompt needs 8 and some to grow."""
    scheduler = Scheduler(Pages(41), PAGE, lanes=8, budget=64)
    for number in range(4):
        scheduler.add(sequence(range(number, number + 30), 60, number, key="flood"))
    decode(scheduler, 12)
    assert scheduler.pages.available == 8 and len(scheduler.running) == 3
    one = sequence(range(900, 930), 2, 9, key="other")
    scheduler.add(one)
    decode(scheduler, 2)
    assert one.finish_reason == "length" and scheduler.preemptions >= 1


def test_a_short_prompt_is_read_before_the_long_ones_of_a_key_that_was_served_more():
    scheduler = Scheduler(Pages(1000), PAGE, lanes=4, budget=32)
    for number in range(3):
        scheduler.add(sequence(range(number, number + 900), 9, number, key="long"))
    decode(scheduler, 3)
    one = sequence(8, 1, 9, key="short")
    scheduler.add(one)
    decode(scheduler, 2)
    assert one.finish_reason == "length"


def test_completions_of_one_prompt_share_its_pages():
    scheduler = Scheduler(Pages(100), PAGE, lanes=4, budget=64)
    params = dataclasses.replace(SamplingParams(), max_tokens=3, seed=0, n=2)
    request = Request(prompt=None, token_ids=(7,) * 11, params=params, root=b"m")
    pair = [Sequence(request, child, None, 0.0, child) for child in range(2)]
    for one in pair:
        scheduler.add(one)
    assert scheduler.admit() == pair[:1]  # the second waits for the first one's prompt
    scheduler.cached(pair[0], scheduler.plan()[0][0].count)
    pair[0].append(Choice(1), 0.0)
    scheduler.mark_finite(pair[0])
    assert scheduler.admit() == pair[1:]
    assert pair[1].pages[:2] == pair[0].pages[:2] and pair[1].pages[2] != pair[0].pages[2]
    assert pair[1].cached == 8 and scheduler.prefix_hits == 8
