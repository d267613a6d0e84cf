"""Model folders as an enemy would write them: one mutation of a good folder for each seed."""

import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

EVIL = "import pathlib; pathlib.Path(__file__).with_name('ran').write_text('x')\n"
VALUES = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**12, 10**30, 10**400, 1.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "silu", "a" * 10000, "../../etc/passwd", "/etc/passwd", "float64",
    "\ud800", [], [0],
    [[]], ["full_attention"], list(range(1000)), {}, {"a": 1}, {"type": "yarn"}, {"rope_type": ["yarn"]},
    {"rope_type": "yarn", "factor": 10**400}, {"rope_type": "linear", "factor": float("inf")},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": float("inf")},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": "1", "high_freq_factor": None},
    {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]},
)  # fmt: skip
CONFIG = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads dtype "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta "
    "rope_scaling rope_parameters torch_dtype attention_bias mlp_bias sliding_window use_sliding_window "
    "layer_types num_key_value_layers key_value_group_size swiftkv_tail hidden_act auto_map architectures "
    "eos_token_id quantization_config partial_rotary_factor trust_remote_code tokenizer_class _name_or_path "
    "unheard_of"
).split()
GENERATION = (
    "eos_token_id bos_token_id pad_token_id do_sample temperature top_k top_p min_p repetition_penalty "
    "max_length"
).split()
TOKENIZER_CONFIG = (
    "tokenizer_class auto_map tokenizer_file vocab_file merges_file chat_template bos_token eos_token "
    "pad_token unk_token additional_special_tokens extra_special_tokens added_tokens_decoder "
    "model_max_length init_inputs gguf_file tokenizer_object from_slow name_or_path padding_side "
    "truncation_side add_bos_token is_local image_token processor_class "
    "sp_model_kwargs vocab merges backend local_files_only __slow_tokenizer"
).split()
CLASSES = (
    "BertTokenizer LlamaTokenizer CLIPTokenizer T5Tokenizer MistralCommonBackend evil.Tokenizer "
    "GPT2Tokenizer BertJapaneseTokenizer TapexTokenizer AutoTokenizer os.system "
    "../evil PythonBackend WhisperTokenizer"
).split()
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 900000000 }}", "{{ [0] * 900000000 }}", "{{ 2 ** (2 ** 62) }}", "{{ 'a'.ljust(2000000000) }}",
    "{% set n = namespace(a='x') %}{% for i in range(64) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "{{ '%2000000000d' % 1 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{% include '/etc/passwd' %}",
    "{% extends '../secret.txt' %}", "{% import 'os' as os %}{{ os.environ }}", "{{ lipsum.__globals__ }}",
    "{{ raise_exception('no\nline') }}", "{{ 1 / 0 }}", "{{ undefined.attribute }}", 
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{%" * 3000, "{{ (" * 3000, "{% if 1 %}" * 2000,
    "", "{{ messages }}", "\x00",
    "{{ messages[0].content * 100000000 }}", "{{ strftime_now('%' * 1000) }}", "{{ namespace(__class__=1) }}",
    "{{ dict(a=1).__class__ }}", "{% set x = messages.append(1) %}", "{{ range(10 ** 12) | list }}",
    "{{ lipsum(n=100000) }}", "{{ messages | tojson(indent=900000000) }}",
    "{{ 'x' | indent(width=900000000) }}",
)  # fmt: skip


class Folder:
    """A good folder about to be spoilt. `outside` holds a good copy of every file, which nobody may read."""

    def __init__(self, path: Path, outside: Path, seed: int):
        self.path, self.outside, self.random = path, outside, random.Random(seed)

    def spoil(self) -> str:
        """One mutation; what it was."""
        kinds: list[tuple[int, Callable[[], str]]] = [
            (6, self._config), (2, self._generation), (3, self._index), (6, self._weights),
            (4, self._vocabulary), (5, self._tokenizer_config), (2, self._special), (3, self._template),
            (3, self._link),
            (2, self._code), (3, self._bytes),
        ]  # fmt: skip
        weights, functions = zip(*kinds, strict=True)
        return self.random.choices(functions, weights)[0]()

    def _names(self, pattern: str = "*") -> list[str]:
        return sorted(path.name for path in self.path.glob(pattern))

    def _field(self, name: str, fields: list[str], values: tuple = VALUES) -> str:
        file, field = self.path / name, self.random.choice(fields)
        raw = json.loads(file.read_text()) if file.exists() else {}
        if self.random.random() < 0.15:
            raw.pop(field, None)
            value = "(gone)"
        else:
            value = raw[field] = self.random.choice(values)
        file.write_text(json.dumps(raw))
        return f"{name}: {field} = {str(value)[:60]!r}"

    def _config(self) -> str:
        return self._field("config.json", CONFIG)

    def _generation(self) -> str:
        return self._field("generation_config.json", GENERATION)

    def _tokenizer_config(self) -> str:
        if self.random.random() < 0.3:
            return self._field("tokenizer_config.json", ["tokenizer_class"], tuple(CLASSES))
        files = tuple(str(self.outside / name) for name in self._names("*token*"))
        return self._field("tokenizer_config.json", TOKENIZER_CONFIG, VALUES + files)

    def _special(self) -> str:
        name = self.random.choice(("special_tokens_map.json", "added_tokens.json"))
        if name == "added_tokens.json":
            return self._field(name, ["<|new|>", "", "a", "\ud800"])
        return self._field(name, [*TOKENIZER_CONFIG, "mask_token", "cls_token"])

    def _index(self) -> str:
        name = "model.safetensors.index.json"
        if not (self.path / name).exists():
            (self.path / name).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
        raw = json.loads((self.path / name).read_text())
        tensor = self.random.choice(sorted(raw["weight_map"]))
        other = self.random.choice((
            "../outside/model.safetensors", str(self.outside / "model.safetensors"), "..", "", ".", "/",
            "a/../../x",
            "..\\outside\\model.safetensors", "nowhere.safetensors", "config.json",
            "\x00.safetensors", None, 5, [],
            "model.safetensors\n", "~/model.safetensors", "a" * 5000 + ".safetensors",
        ))  # fmt: skip
        raw["weight_map"][tensor] = other
        if self.random.random() < 0.2:
            raw["weight_map"] = self.random.choice(VALUES)
        if (self.path / "model.safetensors").exists() and self.random.random() < 0.7:
            (self.path / "model.safetensors").unlink()
        (self.path / name).write_text(json.dumps(raw))
        return f"{name}: {tensor} in {str(other)[:40]!r}"

    def _weights(self) -> str:
        file = self.path / self.random.choice(self._names("*.safetensors"))
        content = file.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        tensor = self.random.choice([name for name in header if name != "__metadata__"])
        kinds = "size dtype shape offsets name gone metadata cut more flip raw twice"
        kind = self.random.choice(kinds.split())
        raw = None
        if kind == "size":
            size = self.random.choice((0, 1, 2, size - 1, size + 1, 2**32, 2**63, 2**64 - 1))
            raw = struct.pack("<Q", size) + content[8:]
        elif kind == "dtype":
            dtypes = ("F64", "I8", "U8", "BF16", "F16", "F8_E4M3", "x", 5, None)
            header[tensor]["dtype"] = self.random.choice(dtypes)
        elif kind == "shape":
            shape = header[tensor]["shape"]
            header[tensor]["shape"] = self.random.choice(
                ([], [0], shape[::-1], [*shape, 1], [2**63], [2**32, 2**32], [-1], ["x"], None, [1] * 1000)
            )
        elif kind == "offsets":
            all_of_it = len(data)
            ends = [0, 0], [0, all_of_it], [0, 2**63], [all_of_it, 0], [0, all_of_it + 4]
            header[tensor]["data_offsets"] = self.random.choice((*ends, [-4, 4], [1.5, 2], [], None))
        elif kind == "name":
            other = self.random.choice((f"{tensor}x", "", "../x", "\x00", "lm_head.weight", "a" * 9999))
            header[other] = header.pop(tensor)
        elif kind == "gone":
            del header[tensor]
        elif kind == "metadata":
            header["__metadata__"] = self.random.choice(VALUES)
        elif kind == "cut":
            raw = content[: self.random.randrange(len(content))]
        elif kind == "more":
            raw = content + b"\x00" * self.random.choice((1, 4, 1000))
        elif kind == "flip":
            raw = bytearray(content)
            raw[self.random.randrange(8 + size, len(raw))] ^= 1 << self.random.randrange(8)
        elif kind == "raw":
            raw = self.random.choice((b"", b"\x80\x04.", b"PK\x03\x04", self.random.randbytes(200)))
        else:  # the same name twice: two tensors may not claim one place
            text = json.dumps(header)
            again = f"{json.dumps(tensor)}: {json.dumps(header[tensor])}, "
            raw = text.replace("{", "{" + again, 1).encode()
            raw = struct.pack("<Q", len(raw)) + raw + data
        if raw is None:
            text = json.dumps(header).encode()
            raw = struct.pack("<Q", len(text)) + text + data
        file.write_bytes(raw)
        return f"{file.name}: {kind} of {tensor}"

    def _vocabulary(self) -> str:
        file = self.path / "tokenizer.json"
        raw = json.loads(file.read_text())
        parts = ("", "model", "pre_tokenizer", "decoder", "post_processor", "added_tokens")
        where = self.random.choice(parts)
        place = raw[where] if where else raw
        if isinstance(place, list):
            place = place[0]
        field = self.random.choice(sorted(place or {"type": 0}))
        others = "BPE WordPiece Unigram WordLevel Split Sequence Metaspace ByteFallback".split()
        if isinstance(place, dict):
            place[field] = self.random.choice((*VALUES, *others))
        if where == "model" and field in ("vocab", "merges") and self.random.random() < 0.7:
            bad = ({"a": 2**31}, {"a": -1}, {"a": 0, "b": 0}, {}, [["a", "b"]] * 9, ["a b c"], ["zz zz"])
            place[field] = self.random.choice(bad)
        file.write_text(json.dumps(raw))
        return f"tokenizer.json: {where} {field} = {str((place or {}).get(field))[:60]}"

    def _template(self) -> str:
        source = self.random.choice(TEMPLATES)
        (self.path / "chat_template.jinja").write_text(source)
        return f"chat template {source[:60]!r}"

    def _link(self) -> str:
        name = self.random.choice([*self._names(), "special_tokens_map.json", "additional_chat_templates"])
        file = self.path / name
        if file.exists():
            file.unlink()
        targets = (self.outside / name, "/etc/passwd", "/dev/zero", name, "..", "pipe", "folder")
        target = self.random.choice(targets)
        if target == "pipe":
            os.mkfifo(file)
        elif target == "folder":
            file.mkdir()
        else:
            file.symlink_to(target)
        return f"{name} is a link to {target}"

    def _code(self) -> str:
        """Modules that somebody may import, and the fields that ask for it."""
        for name in "evil json jinja2 transformers tokenizers sitecustomize modeling_evil __init__".split():
            (self.path / f"{name}.py").write_text(EVIL)
        (self.path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
        if self.random.random() < 0.5:
            for path in self.path.glob("*.safetensors"):
                path.unlink()
        places = (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer"))
        name, key = self.random.choice(places)
        raw = json.loads((self.path / name).read_text()) | {"trust_remote_code": True}
        evil = self.random.choice(("evil.Evil", ["evil.Evil", "evil.Evil"], "a/b--evil.Evil"))
        raw["auto_map"] = {key: evil}
        (self.path / name).write_text(json.dumps(raw))
        return f"code, and auto_map in {name}"

    def _bytes(self) -> str:
        """Any text file, spoilt without regard to what it means."""
        file = self.path / self.random.choice(self._names("*.json") + self._names("*.jinja"))
        raw = file.read_bytes()
        at = self.random.randrange(len(raw))
        pieces = (b"", b"\x00", b"\xff\xfe", b"[" * 100000, b"9" * 5000, b"NaN", b"1e999", b'"\\ud800"')
        piece = self.random.choice((*pieces, b"}", b"{", b'"'))
        whole = (b"", b"null", b"[]", raw.decode().encode("utf-16"), b"\xef\xbb\xbf" + raw, b'{"a":' * 100000)
        numbers = list(re.finditer(rb"\d+", raw))
        if self.random.random() < 0.2:
            raw = self.random.choice(whole)
        elif numbers and self.random.random() < 0.4:
            found = self.random.choice(numbers)
            number = self.random.choice((b"-1", b"1e400", b"0", b"9" * 30))
            raw = raw[: found.start()] + number + raw[found.end() :]
        else:
            raw = raw[:at] + piece + raw[at + self.random.randint(0, 3) :]
        file.write_bytes(raw)
        return f"{file.name}: bytes"
