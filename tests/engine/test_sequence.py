"""Text from tokens and the ends of a sequence, against the whole text looked at once."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import tiny_engine as tiny

from swiftkv_jax.engine.request import Request, SamplingParams, special_stops
from swiftkv_jax.engine.sequence import Choice, Sequence

TEXT = st.text(st.sampled_from("ab é漢🙂"), max_size=20)


def start(params: SamplingParams, eos: tuple[int, ...] = (tiny.EOS,)) -> Sequence:
    params = dataclasses.replace(params, seed=0, max_tokens=params.max_tokens or 500)
    return Sequence(Request(prompt="x", token_ids=(120,), params=params, eos_ids=eos), 0, tiny.Bytes(), 0.0)


def feed(sequence: Sequence, tokens) -> Sequence:
    """Add tokens as the engine does: until the sequence ends, ignoring later samples."""
    for moment, token in enumerate(tokens):
        if sequence.finish_reason:
            break
        sequence.append(Choice(token), float(moment))
    return sequence


@hypothesis.given(
    TEXT, st.lists(st.text(st.sampled_from("ab é漢"), min_size=1, max_size=3), max_size=3), st.booleans()
)
def test_stop_strings_cut_where_the_whole_text_says(text, stops, keep):
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep, max_tokens=None)
    sequence = feed(start(params), text.encode())
    # The stop that is complete first ends it; of several complete at once, the one that begins first.
    ends = [(text.find(s) + len(s), text.find(s), i) for i, s in enumerate(stops) if s in text]
    if not ends:
        assert sequence.finish_reason is None
        return
    end, begin, which = min(ends)
    got = sequence.completion()
    assert (got.finish_reason, got.stop_reason) == ("stop", stops[which])
    assert got.text == text[: end if keep else begin]
    assert bytes(got.token_ids) == text[:end].encode()  # tokens up to the one that completed it


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "ab</s>")])
def test_an_end_token_shows_only_when_asked(keep, text):
    params = SamplingParams(include_stop_str_in_output=keep, skip_special_tokens=False)
    got = feed(start(params), [97, 98, tiny.EOS, 99]).completion()
    assert (got.text, got.token_ids) == (text, [97, 98, tiny.EOS])
    assert (got.finish_reason, got.stop_reason) == ("stop", None)


def test_stop_ids_say_which_and_length_counts_the_last_token():
    got = feed(start(SamplingParams(stop_token_ids=[98])), [97, 98, 99]).completion()
    assert (got.text, got.finish_reason, got.stop_reason) == ("a", "stop", 98)
    got = feed(start(SamplingParams(max_tokens=2, stop="c")), [97, 98, 99]).completion()
    assert (got.text, got.finish_reason, got.stop_reason) == ("ab", "length", None)
    got = feed(start(SamplingParams(max_tokens=2, stop="b")), [97, 98, 99]).completion()
    assert (got.text, got.finish_reason, got.stop_reason) == ("a", "stop", "b")


CUT = 256  # a special token that ends no output


class Cut(tiny.Bytes):
    """Bytes with a second special token."""

    special_texts = {"<|cut|>": CUT, "</s>": tiny.EOS}  # noqa: RUF012

    def token_bytes(self, index: int) -> bytes:
        return b"<|cut|>" if index == CUT else super().token_bytes(index)

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        shown = [token for token in ids if not (skip_special_tokens and token >= CUT)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("stop", ["<|cut|>", "<|cut|>\nx", "b<|cut|>", "c<|cut|>\n", "b<|cut|>\nx</s>"])
def test_a_stop_string_may_hold_special_tokens_that_the_text_leaves_out(stop, keep):
    """It stops where it does in the text that shows them; pieces as they stream are the text."""
    given = [*b"ab", CUT, *"🙂c".encode(), CUT, *b"\nab", CUT, *b"\nx", tiny.EOS, *b"y"]
    shown = Cut().decode(given, False)
    for skip in (True, False):
        params = SamplingParams(stop=[stop], skip_special_tokens=skip, include_stop_str_in_output=keep)
        fields = {"token_ids": (120,), "params": dataclasses.replace(params, seed=0, max_tokens=99)}
        request = Request(prompt="x", **fields, **special_stops(Cut(), [stop], 999))
        sequence, pieces = Sequence(request, 0, Cut(), 0.0), ""
        for moment, token in enumerate(given):
            if not sequence.finish_reason:
                sequence.append(Choice(token), float(moment))
                pieces += sequence.delta().text
        got, before = sequence.completion(), shown[: shown.index(stop)]
        before = before.replace("<|cut|>", "") if skip else before
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.text == pieces == before + stop * keep
        assert Cut().decode(got.token_ids, False) == shown[: shown.index(stop) + len(stop)]


def test_a_character_that_the_end_cuts_is_shown_as_one():
    got = feed(start(SamplingParams(max_tokens=3)), "a🙂".encode()).completion()
    assert got.text == "a\ufffd"


def test_nothing_ends_before_min_tokens():
    params = SamplingParams(min_tokens=4, stop="ab", stop_token_ids=[98])
    got = feed(start(params), b"abababab").completion()
    assert got.token_ids == list(b"abab") and got.stop_reason == 98
    got = feed(start(dataclasses.replace(params, stop_token_ids=())), b"abababab").completion()
    assert (got.token_ids, got.text, got.stop_reason) == (list(b"abab"), "ab", "ab")


def test_metrics_are_differences_of_moments():
    sequence = start(SamplingParams(max_tokens=5))
    sequence.arrival = -2.0
    metrics = feed(sequence, b"abcde").metrics
    assert (metrics.ttft, metrics.tpot, metrics.output_tokens) == (2.0, 1.0, 5)
