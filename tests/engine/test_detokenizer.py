"""Text from tokens: what prompt and output decode to, whatever bytes they are, and the tokens' own texts."""

import codecs
import random
import typing
from pathlib import Path

import pytest
from tokenizers_made import make_sentencepiece

from swiftkv_jax.engine.sequence import Detokenizer, word
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parents[2] / "demo" / "tokenizer"
# Of characters of two to four bytes; cut ones, surrogates, overlong forms, and what is in none.
PARTS = b"\xf0\x9f\x8c\xb6\xe2\x96\x81\xc3\xa9\xed\xa0\x80\xf4\x90\xe0\xc0\xff a"


@pytest.fixture(scope="module", params=["bytes", "SentencePiece"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return load_tokenizer(DEMO)
    return load_tokenizer(make_sentencepiece(tmp_path_factory.mktemp("made")))


def of_bytes(tokenizer: Tokenizer) -> list[typing.Any]:
    """The token of each byte, by the names that GPT-2 and SentencePiece give them."""
    if "<0x00>" in tokenizer.rust.get_vocab():
        return [tokenizer.rust.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in seen}
    names |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in seen)}
    return [tokenizer.rust.token_to_id(names[byte]) for byte in range(256)]


def pending(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether the text of these tokens ends within a character."""
    shown = [token for token in ids if not (skip and token in tokenizer.special_texts.values())]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(tokenizer.token_bytes, shown)))
    return bool(decoder.getstate()[0])


def test_the_text_is_the_decode_of_prompt_and_output_for_any_bytes(tokenizer):
    source, bytes_ = random.Random(0), of_bytes(tokenizer)
    pools = bytes_, [bytes_[byte] for byte in PARTS], range(tokenizer.vocab_size)
    for _ in range(600):
        pool, length, skip = source.choice(pools), source.randrange(45), source.random() < 0.5
        ids = [source.choice(pool if source.random() < 0.7 else pools[1]) for _ in range(length)]
        cut = source.randrange(length + 1)
        words, pieces = Detokenizer(tokenizer, tuple(ids[:cut]), skip), []
        for token in ids[cut:]:
            begun = len(words.text)
            words.push(token)
            pieces.append(words.text[begun:])
        told = len(words.text)
        words.finish()
        before = len(tokenizer.decode(ids[:cut], skip)) - pending(tokenizer, ids[:cut], skip)
        assert words.text == tokenizer.decode(ids, skip)[before:], (ids, cut, skip)
        assert "".join(pieces) == words.text[:told]
        assert len(words.text) - told == pending(tokenizer, ids, skip)  # nothing else is held back


def test_decoding_bytes_is_that_of_utf_8(tokenizer):
    """Of any bytes, valid or not: text that is decoded does not change with what follows."""
    source, ids = random.Random(1), of_bytes(tokenizer)
    for _ in range(2000):
        raw = bytes(source.choice(PARTS) for _ in range(source.randrange(20)))
        want = raw.decode(errors="replace")
        assert tokenizer.decode([ids[byte] for byte in raw]) == want or want.startswith(" ")


def test_tokens_have_texts_of_their_own(tmp_path):
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path))
    texts = {name: word(tokenizer, tokenizer.rust.token_to_id(name)) for name in tokenizer.rust.get_vocab()}
    assert (texts["▁true"], texts["true"], texts["▁"], texts["</s>"]) == (" true", "true", " ", "</s>")
    assert (
        texts["\ufffd"] == "\ufffd"
        and tokenizer.token_bytes(tokenizer.rust.token_to_id("\ufffd")) == "\ufffd".encode()
    )


def test_each_token_is_decoded_with_few_others(tokenizer, monkeypatch):
    """However long the text is, and whatever it is made of: text, stray bytes, cut characters, special tokens
    and unknown ones."""
    bytes_, decode, sizes = of_bytes(tokenizer), tokenizer.decode, []
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, *a, **k: sizes.append(len(ids)) or decode(ids, *a, **k)
    )
    special = list(tokenizer.special_texts.values())
    text, unknown = tokenizer.encode("a true"), tokenizer.vocab_size + 5
    for tokens in (text, [bytes_[0xFF]], [bytes_[0xF0]], special, [unknown]):
        sizes.clear()
        words = Detokenizer(tokenizer, tuple(tokens * 500), True)
        made = sum(sizes)
        for token in tokens * 500:
            words.push(token)
        assert (
            max(sizes) <= 9 and (sum(sizes) - made) / (500 * len(tokens)) < 11 and made < 3000 * len(tokens)
        )
