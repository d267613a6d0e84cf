"""The tokenizer wrapper against transformers; the assistant's tokens in chats that repeat themselves."""

import datetime
import functools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_made import BOS, CHATML, END, EOS, GENERATION, INSTRUCT, PLAIN, make_tokenizer
from transformers import AutoTokenizer

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer
from swiftkv_jax.text.tokenizer_files import Described

DEMO = Path(__file__).parent.parent.parent / "demo" / "tokenizer"
REPEATED = (
    {"role": "user", "content": "Say the cat sat."},
    {"role": "assistant", "content": "the cat sat"},
    {"role": "user", "content": "Again: the cat sat"},
    {"role": "assistant", "content": "the cat sat"},
    {"role": "user", "content": "the cat sat"},
    {"role": "assistant", "content": "assistant\nthe cat sat on the cat sat"},
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tokenizers by template, each made once."""
    kept: dict = {}

    def get(template: str | None = None, bos: bool = True) -> Tokenizer:
        if (template, bos) not in kept:
            folder = make_tokenizer(tmp_path_factory.mktemp("made"), template, bos)
            kept[template, bos] = load_tokenizer(folder)
        return kept[template, bos]

    return get


def runs(tokenizer: Tokenizer, ids: list[int], mask: list[bool]) -> list[str]:
    """The text of each run of masked tokens."""
    out, inside = [], False
    for token, counts in zip(ids, mask, strict=True):
        if counts and not inside:
            out.append([])
        if counts:
            out[-1].append(token)
        inside = counts
    return [tokenizer.decode(run, skip_special_tokens=False) for run in out]


def test_encode_is_that_of_transformers_and_decodes_back():
    ours, theirs = load_tokenizer(DEMO), AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    for text in ("Hello, world", "", "  def f(x):\n\treturn x  # naïve 雪 🙂\n", "<|end|> in the text"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == plain
        assert ours.decode(ours.encode(text)) == theirs.decode(plain, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (0, (1,), 2048)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_any_text_comes_back(text):
    ids = _demo().encode(text, add_special_tokens=False)
    assert _demo().decode(ids, skip_special_tokens=False) == text


@functools.cache
def _demo() -> Tokenizer:
    return load_tokenizer(DEMO)


def test_a_long_text_is_not_cut_and_an_unknown_model_type_does_not_matter(tmp_path):
    make_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "config.json").write_text('{"model_type": "llama_swiftkv"}')
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    text = "the cat sat on the mat " * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_brings_its_own_bos_gets_no_second(made):
    tokenizer = made(CHATML)
    rendered = f"{BOS}the cat"
    assert tokenizer.encode(rendered) == tokenizer.encode("the cat")
    assert tokenizer.encode(rendered).count(tokenizer.bos_id) == 1
    assert made(CHATML, bos=False).encode("the cat")[0] != tokenizer.bos_id


@pytest.mark.parametrize("template", [CHATML, GENERATION, PLAIN], ids=["chatml", "generation", "plain"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_is_that_of_transformers_with_one_bos(made, template, prompt):
    tokenizer = made(template)
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True)
    want = theirs.apply_chat_template(list(REPEATED), add_generation_prompt=prompt)["input_ids"]
    got = tokenizer.encode_chat(REPEATED, prompt)
    assert got == want
    assert got.count(tokenizer.bos_id) == (template != PLAIN)


@pytest.mark.parametrize("call", ["encode_chat", "assistant_mask"])
def test_two_bos_from_template_and_message_is_an_error(made, call):
    tokenizer = made("{{ bos_token }}" + PLAIN.replace("{{ m.role }}: ", ""))
    messages = [{"role": "user", "content": BOS + "hi"}, {"role": "assistant", "content": "hi"}]
    with pytest.raises(UsageError, match="two BOS tokens"):
        getattr(tokenizer, call)(messages, *[False] * (call == "encode_chat"))


@pytest.mark.parametrize(
    "template, end",
    [
        (CHATML, END),
        (GENERATION, END),
        (GENERATION.replace("<|end|>{% endg", "{% endg"), None),
        (PLAIN, "\n"),
    ],
    ids=["chatml", "generation", "generation_without_end", "plain"],
)
def test_assistant_mask_of_repeated_text(made, template, end):
    if end is None:  # the block leaves the end out, the template puts it behind
        template, end = template.replace("{% endgeneration %}", "{% endgeneration %}<|end|>"), END
    tokenizer = made(template)
    ids, mask = tokenizer.assistant_mask(REPEATED)
    assert ids == tokenizer.encode_chat(REPEATED, False)
    found = runs(tokenizer, ids, mask)
    if template == PLAIN:  # one token is the space before the answer and its first word: it counts
        found = [run.removeprefix(" ") for run in found]
    assert found == [m["content"] + end for m in REPEATED if m["role"] == "assistant"]


def test_assistant_mask_where_the_template_trims(made):
    tokenizer = made(INSTRUCT)
    messages = [dict(m, content=f"\n {m['content']}  ") for m in REPEATED]
    ids, mask = tokenizer.assistant_mask(messages)
    want = [m["content"] for m in REPEATED if m["role"] == "assistant"]
    assert [run.strip(" ") for run in runs(tokenizer, ids, mask)] == [f"{text} {EOS}" for text in want]


def test_assistant_mask_where_earlier_turns_look_different_when_last(made):
    """Qwen 3 opens only the last turn with an empty thought: prefixes of such a chat render differently."""
    template = CHATML.replace(
        "{{ m.content }}<|end|>",
        "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|end|>",
    )
    tokenizer = made(template)
    ids, mask = tokenizer.assistant_mask(REPEATED)
    assert runs(tokenizer, ids, mask) == [m["content"] + END for m in REPEATED if m["role"] == "assistant"]


_words = st.lists(
    st.sampled_from(["the", "cat", "assistant", "\n", "é雪", "user", "<|end", "."]), max_size=5
).map(" ".join)


@given(st.lists(st.tuples(_words, _words), min_size=1, max_size=4))
@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["chatml", "generation"])
def test_assistant_mask_of_any_chat(made, template, pairs):
    roles = ("user", "assistant")
    messages = [{"role": r, "content": c} for pair in pairs for r, c in zip(roles, pair, strict=True)]
    tokenizer = made(template)
    ids, mask = tokenizer.assistant_mask(messages)
    assert runs(tokenizer, ids, mask) == [answer + END for _, answer in pairs]


def test_pinned_date_reaches_both_kinds_of_template(made):
    date = datetime.date(2024, 7, 26)
    for asked, shown in (("date_string", "26 Jul 2024"), ("strftime_now('%Y-%m-%d')", "2024-07-26")):
        tokenizer = made("{{ " + asked + " }}" + PLAIN)
        text = tokenizer.decode(tokenizer.encode_chat(REPEATED[:1], False, date))
        assert text.startswith(f"{shown}user:")
    today = tokenizer.decode(tokenizer.encode_chat(REPEATED[:1], False))
    assert not today.startswith("2024-07-26")


@pytest.mark.parametrize(
    "template, messages, expected",
    [
        (None, REPEATED, "has no chat template"),
        (INSTRUCT, [{"role": "system", "content": "x"}], "only user and assistant"),
        (CHATML, [], "refuses these messages"),
        (PLAIN.replace("m.content", "m.content | upper"), REPEATED, "does not mark the assistant's turns"),
    ],
)
def test_templates_that_cannot_be_used(made, template, messages, expected):
    with pytest.raises(UsageError, match=expected):
        made(template).assistant_mask(messages)


def panicking(folder: Path) -> Path:
    """A tokenizer whose regular expression gives up, by a panic in Rust, on a text of many x."""
    fields = json.loads((make_tokenizer(folder) / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, fields["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


def test_a_panic_of_the_library_is_an_error_of_the_text(tmp_path):
    tokenizer = load_tokenizer(panicking(tmp_path))
    assert tokenizer.decode(tokenizer.encode("xxy")[1:]) == "xxy"
    for text in ("x" * 3000, "x" * 5000):  # one by one, and by the call for many
        with pytest.raises(UsageError) as caught:
            tokenizer.encode(text)
        assert "\n" not in str(caught.value) and not isinstance(caught.value.__cause__, Exception)
    assert tokenizer.encode("the cat")


@pytest.mark.parametrize("text", ["naïve 雪 🙂\n\t", "a<|end|>b", "\x00\x7f\x80\xad¡ÿ"])
def test_the_bytes_of_tokens_join_to_the_text(text):
    tokenizer = load_tokenizer(DEMO)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_the_bytes_of_sentencepieces_fallback():
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    rust = tokenizers.Tokenizer(
        tokenizers.models.BPE(dict(zip(names, range(256), strict=True)), [], byte_fallback=True)
    )
    rust.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    tokenizer = Tokenizer(Described(rust, {}, {}), "x", Path())
    ids = tokenizer.encode("🙂é")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🙂é".encode() and len(ids) == 6


def test_fingerprint_follows_template_and_vocabulary(made, tmp_path):
    again = load_tokenizer(make_tokenizer(tmp_path, CHATML))
    assert again.fingerprint == made(CHATML).fingerprint
    assert len({made(t, b).fingerprint for t in (CHATML, PLAIN) for b in (True, False)}) == 4
