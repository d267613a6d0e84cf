"""Text to token ids and back: a thin wrapper over a tokenizer of Hugging Face's `tokenizers`."""

import bisect
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from swiftkv_jax.common.errors import UsageError, first_line
from swiftkv_jax.config.gguf_header import gguf_of, read_header
from swiftkv_jax.text.gguf_tokenizer import TOKENS, tokenizer_files
from swiftkv_jax.text.messages import MARKER, conversation, lost, with_roles_of
from swiftkv_jax.text.template import Template
from swiftkv_jax.text.tokenizer_files import FILES, VOCABULARIES, Described, described, read

_REASONING = ("reasoning_content", "thinking", "reasoning")
_LONG = 2**12  # characters or ids; longer calls release the GIL
_NO_CHARACTER = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# GPT-2 writes invisible bytes as the characters from U+0100 on, in order, and others unchanged.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = [byte for byte in range(0x100) if byte not in _SEEN]
_BYTE_OF = {chr(byte): byte for byte in _SEEN} | {chr(0x100 + i): byte for i, byte in enumerate(_UNSEEN)}


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer in a folder or a GGUF file, or that of a hub model (`org/name`).

    Ids are those of tokenizer.json, or of GPT-2's vocab.json and merges.txt. No code of a model's folder is
    run.
    """
    folder = Path(path).expanduser()
    if has_tokenizer(folder):
        folder = folder if _has_files(folder) else gguf_of(folder) or folder
    elif folder.exists():
        raise UsageError(f"no tokenizer in {folder}: it needs {FILES[0]} and tokenizer_config.json")
    elif not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", str(path)):
        raise UsageError(f"tokenizer folder {path} does not exist")
    try:
        if not folder.exists():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(str(path), allow_patterns=[*FILES, "config.json"]))
        if folder.is_dir():
            return Tokenizer(read(folder), str(path), folder)
        whole, config = tokenizer_files(read_header(folder)).values()
        rust = tokenizers.Tokenizer.from_str(json.dumps(whole))
        return Tokenizer(described(rust, config, str(folder)), str(path), folder)
    except UsageError:
        raise
    except BaseException as error:  # the hub's client and `tokenizers` raise many types
        raise UsageError(f"cannot load a tokenizer from {path}: {_reason(error)}") from error


def has_tokenizer(place: Path) -> bool:
    """Whether a folder holds a tokenizer's files, valid or not, or a GGUF file with tokens.

    `place` may be that file itself.
    """
    file = None if _has_files(place) else gguf_of(place)
    return _has_files(place) or (file is not None and TOKENS in read_header(file).metadata)


def _has_files(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def _reason(error: BaseException) -> str:
    """The first line of an error of Rust's tokenizers: a bare Exception, or a panic, which is a
    BaseException. Others are the interpreter's own, such as KeyboardInterrupt, and are raised."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return first_line(error)


class Tokenizer:
    """Token ids of texts and of chats.

    Attributes:
      rust: the one of `tokenizers`. name: the path or id that it was loaded by. folder: its files' folder, or
        the GGUF file.
      named: special tokens by their roles, such as "bos_token". templates: chat templates by name.
      bos_id: the id put in front of a text, or None. eos_ids: ids that end a text, according to the
        tokenizer.
      vocab_size: number of tokens, added ones included.
    """

    def __init__(self, files: Described, name: str, folder: Path):
        self.rust, self.name, self.folder = files.rust, name, folder
        self.named, self.templates = files.named, files.templates
        self.rust.no_truncation()
        self.rust.no_padding()
        pairs = ((role, self.rust.token_to_id(token)) for role, token in self.named.items())
        ids = {role: index for role, index in pairs if index is not None}
        self.bos_id, eos = ids.get("bos_token"), ids.get("eos_token")
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.vocab_size: int = self.rust.get_vocab_size()
        added = self.rust.get_added_tokens_decoder().items()
        self._special = {index for index, token in added if token.special} | {*ids.values()}

    @functools.cached_property
    def special_texts(self) -> dict[str, int]:
        """The ids of the control tokens by their text: a text that contains one is encoded to that token."""
        return dict(sorted((str(self.rust.id_to_token(index)), index) for index in self._special))

    @property
    def added(self) -> dict[str, int]:
        """The ids of the tokens that are taken from a text before it is split, special or not."""
        return {token.content: index for index, token in self.rust.get_added_tokens_decoder().items()}

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the ids of any text or chat may change."""
        return hashlib.sha256((self.rust.to_str() + str(self.chat_template)).encode()).hexdigest()[:16]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. A text that already begins with BOS (a rendered chat, say) gets no second one."""
        ids = self._ids(text, add_special_tokens)
        return ids[1:] if add_special_tokens and self._two_bos(ids) else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids, white space untouched. Bytes that are no UTF-8 become U+FFFD."""
        with self._contained("these ids"):
            if len(ids) < _LONG:
                text = self.rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:
                text = self.rust.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._mended(ids, skip_special_tokens) if _NO_CHARACTER in text and self._falls_back else text

    @functools.cached_property
    def _falls_back(self) -> bool:
        """Whether the tokens <0x00> to <0xFF> stand for bytes, as in SentencePiece."""
        return self._joined(["<0x41>"]) == "A"

    def _mended(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text where bytes are no UTF-8. The library replaces all bytes that are neighbours of such a
        byte, so that a text once decoded would change with what follows it."""
        hidden = self._special if skip_special_tokens else ()
        names = [self.rust.id_to_token(index) or "" for index in ids if index not in hidden]
        parts = []
        for of_bytes, run in itertools.groupby(names, key=lambda name: _BYTE.fullmatch(name) is not None):
            if of_bytes:
                raw = bytes.fromhex("".join(name[3:5] for name in run))
                for number, piece in enumerate(raw.decode(errors="replace").split(_NO_CHARACTER)):
                    parts += [_NO_CHARACTER] * (number > 0) + [f"<0x{byte:02X}>" for byte in piece.encode()]
            else:
                parts += run
        return self._joined(parts)

    def token_bytes(self, index: int) -> bytes:
        """The bytes that one token stands for within a text, possibly only part of a character."""
        name = self.rust.id_to_token(index) or ""
        text = self._joined(["a", name]).removeprefix("a")  # decoders drop the space of a first token
        if _NO_CHARACTER in text and self._falls_back and (match := _BYTE.fullmatch(name)):
            return bytes.fromhex(match[1])
        if _NO_CHARACTER in text and all(character in _BYTE_OF for character in name):  # GPT-2
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()

    def _joined(self, names: list[str]) -> str:
        """The text of some tokens, given by their names."""
        return " ".join(names) if self.rust.decoder is None else self.rust.decoder.decode(names)

    @contextlib.contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """Turn errors of the Rust code, panics included, into a UsageError of this call."""
        try:
            yield
        except BaseException as error:
            raise UsageError(f"the tokenizer of {self.name} fails on {what}: {_reason(error)}") from error

    def encode_chat(
        self, messages: Sequence[dict], add_generation_prompt: bool, date: datetime.date | None = None
    ) -> list[int]:
        """Ids of a chat under the model's own template.

        Args:
          messages: `{"role": ..., "content": ...}` each, in the forms that messages.py converts.
          add_generation_prompt: end with what opens an assistant turn.
          date: what a template that prints the date sees; today if None.
        """
        _, text, _ = self._rendered_alike(messages, date, add_generation_prompt=add_generation_prompt)
        return self._checked(self._ids(text, add_special_tokens=False))

    def assistant_mask(
        self, messages: Sequence[dict], date: datetime.date | None = None
    ) -> tuple[list[int], list[bool]]:
        """Ids of a whole chat, and which of them are the assistant's: its turns and the token that ends each.

        The template's `{% generation %}` blocks are used if it has them. Otherwise the chat is rendered once
        more for each turn, with a marker as its content. The text before and after the marker bounds the turn
        in the chat itself, however often its content occurs there.
        """
        messages, text, blocks = self._rendered_alike(messages, date)
        if re.search(r"\{%-?\s*generation\b", str(self.chat_template)):
            spans = [span for span in blocks if span[0] < span[1]]
        else:
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [span for i in turns if (span := self._turn(text, messages, i, date))]
            if turns and not spans:
                raise UsageError(f"the chat template of {self.name} does not mark the assistant's turns")
        with self._contained("this text"):
            encoded = self.rust.encode(text, add_special_tokens=False)
        ids, mask = encoded.ids, [False] * len(encoded.ids)
        starts, ends = [a for a, _ in encoded.offsets], [b for _, b in encoded.offsets]
        for first, last in spans:  # characters; the tokens that touch them count
            start = bisect.bisect_right(ends, first)
            end = self._turn_end(ids, start, bisect.bisect_left(starts, last))
            mask[start:end] = [True] * (end - start)
        return self._checked(ids), mask

    def _rendered_alike(self, messages, date, **options) -> tuple[list[dict], str, list[tuple[int, int]]]:
        """The messages as the template reads them, the chat's text, and its generation blocks."""
        if self.template is None:
            raise UsageError(f"the tokenizer of {self.name} has no chat template: give texts, not messages")
        messages = with_roles_of(
            self.template.source,
            conversation(messages, f"the chat template of {self.name} refuses these messages"),
        )
        text, spans = self._rendered(messages, date, **options)
        number = lost(messages, text, lambda changed: self._rendered(changed, date, **options)[0])
        if number is not None:
            role = messages[number]["role"]
            raise UsageError(f"the chat template of {self.name} leaves out message {number}, of {role!r:.80}")
        return messages, text, spans

    def _turn(self, text: str, messages, index: int, date) -> tuple[int, int] | None:
        """The characters of `text` that come from turn `index`; None if the template leaves it out."""
        marked = [*messages[:index], {**messages[index], "content": MARKER}, *messages[index + 1 :]]
        before, marker, rest = self._rendered(marked, date)[0].partition(MARKER)
        if not marker:
            return None
        after = rest.rpartition(MARKER)[2]
        start = _shared(text, before)
        return start, len(text) - _shared(text[start:][::-1], after[::-1])

    def _turn_end(self, ids: list[int], first: int, end: int) -> int:
        """`end`, moved past the special token that ends the turn, or past one token if there is none."""

        def blank(index):
            return not self.decode(ids[index : index + 1], skip_special_tokens=False).strip()

        last = end
        while last > first and blank(last - 1):
            last -= 1
        if last > first and ids[last - 1] in self._special:
            return end  # a generation block that includes its end token
        following = end
        while following < len(ids) and ids[following] not in self._special and blank(following):
            following += 1
        if following < len(ids) and ids[following] in self._special:
            return following + 1
        return min(end + 1, len(ids))

    def _rendered(self, messages, date, **options) -> tuple[str, list[tuple[int, int]]]:
        """A chat's text, and the characters [start, end) of its generation blocks."""
        assert self.template is not None  # see _rendered_alike
        values = {**self.named, "tools": None, "documents": None, "add_generation_prompt": False, **options}
        values["messages"] = []
        for message in messages:  # with its reasoning under every name that published templates read
            reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
            names = {"thinking": reasoning, **message, "reasoning_content": reasoning}
            values["messages"].append(message if reasoning is None else names)
        if date is not None:
            values["date_string"] = date.strftime("%d %b %Y")
        try:
            return self.template.render(values, date)
        except UsageError as error:
            raise UsageError(f"the chat template of {self.name} refuses these messages: {error}") from error

    @functools.cached_property
    def template(self) -> Template | None:
        return Template(self.chat_template) if self.chat_template else None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template that is not for a purpose of its own, such as tools."""
        return self.templates.get("default")

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text. Long texts use the library's batch call, the only one that releases the GIL:
        megabytes take seconds, and a server's event loop must run meanwhile."""
        with self._contained("this text"):
            if len(text) < _LONG:
                return self.rust.encode(text, add_special_tokens=add_special_tokens).ids
            return self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _two_bos(self, ids: list[int]) -> bool:
        return self.bos_id is not None and ids[:2] == [self.bos_id] * 2

    def _checked(self, ids: list[int]) -> list[int]:
        if self._two_bos(ids):
            advice = f"take {self.named['bos_token']!r} out of the first message"
            raise UsageError(f"a chat has two BOS tokens under the template of {self.name}: {advice}")
        return ids


def _shared(text: str, start: str) -> int:
    """Length of the common prefix."""
    if text.startswith(start):
        return len(start)
    pairs = zip(text, start, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(start)))
