"""Tokenizer folders in the form that families publish them, against transformers on the same folder."""

import json
from pathlib import Path

import pytest
from tokenizers_made import CHATML, trained
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.text.tokenizer import load_tokenizer

TEXTS = ("the cat sat", "", "naïve 雪 🙂 user", "on  the\nlog, it ' s . n't", "a</s>b <|endoftext|><eos>")
END = "<|endoftext|>"
START, NONE = "<|startoftranscript|>", "<|notimestamps|>"
SENTINELS = [f"<extra_id_{i}>" for i in range(100)]
BOTH = {"unk_token": END, "bos_token": END, "eos_token": END}
ENDS, PAD = {"unk_token": END, "pad_token": END}, {"pad_token": "<pad>"}
# How a family publishes its tokenizer: the kind of tokenizer.json, the tokens around a text, special tokens
# without a role, and those with one, in the order of their ids.
FORMS: dict[str, tuple] = {
    "gpt2": ("bytes", ("", ""), [], BOTH),
    "olmo": ("bytes", ("", ""), ["<|padding|>"], {"eos_token": END, "pad_token": "<|padding|>"}),
    "qwen2": ("bytes", ("", ""), ["<|im_start|>"], ENDS | {"eos_token": "<|im_end|>"}),
    "whisper": ("bytes", (f"{START} {NONE}", END), [START, "<|en|>", NONE], BOTH),
    "llama2": ("pieces", ("<s>", ""), [], {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "llama3": ("bytes", ("<s>", ""), ["<|eot|>"], {"bos_token": "<s>", "eos_token": "<|eot|>"}),
    "gemma": (
        "plain_pieces",
        ("<bos>", ""),
        ["<start_of_turn>", "<end_of_turn>"],
        PAD | {"eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>", "mask_token": "<m>"},
    ),
    "t5": ("unigram", ("", "</s>"), SENTINELS, PAD | {"eos_token": "</s>", "unk_token": "<unk>"}),
}
CLASSES = {"GPT2Tokenizer": "gpt2", "GPTNeoXTokenizer": "olmo", "GPTNeoXTokenizerFast": "olmo"}
CLASSES |= {"Qwen2Tokenizer": "qwen2", "WhisperTokenizer": "whisper", "LlamaTokenizer": "llama2"}
CLASSES |= {"LlamaTokenizerFast": "llama3", "PreTrainedTokenizerFast": "llama3"}
CLASSES |= {"GemmaTokenizer": "gemma", "GemmaTokenizerFast": "gemma"}
CLASSES |= {"T5Tokenizer": "t5", "T5TokenizerFast": "t5"}


def made(form: str):
    kind, around, more, named = FORMS[form]
    return trained(kind, [*dict.fromkeys([*named.values(), *more])], around)


def write(folder: Path, rust, config: dict, **files) -> Path:
    """A folder with this tokenizer.json, this tokenizer_config.json and other files, JSON or text."""
    rust.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": config, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def published(folder: Path, kind: str, **changes) -> Path:
    form = CLASSES[kind]
    more, named = FORMS[form][2:]
    config = {"tokenizer_class": kind, "additional_special_tokens": more, "model_max_length": 512, **named}
    return write(folder, made(form), config | changes)


def same(folder: Path, texts=TEXTS, theirs=None) -> None:
    """Ids, texts, special tokens and sizes of a folder are those of transformers."""
    ours = load_tokenizer(folder)
    theirs = theirs or AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in texts:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == want
    assert ours.named.items() <= theirs.special_tokens_map.items(), "classes have tokens of their own"
    assert (ours.eos_ids, ours.vocab_size) == ((theirs.eos_token_id,), len(theirs))
    assert ours.bos_id in (theirs.bos_token_id, None)
    special = {index for index, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours._special == special | {*theirs.all_special_ids}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_as_its_family_publishes_it(kind, tmp_path):
    """LlamaTokenizer in transformers has rules of its own for the space after a special token."""
    same(published(tmp_path, kind), TEXTS[:-1] if kind == "LlamaTokenizer" else TEXTS)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GemmaTokenizer"])
def test_whether_bos_and_eos_are_added_is_said_by_tokenizer_json_alone(kind, tmp_path):
    same(published(tmp_path, kind, add_bos_token=False, add_eos_token=True), TEXTS[:-1])


@pytest.mark.parametrize(
    "kind", ["LlamaTokenizer", "LlamaTokenizerFast", "BertTokenizer", "evil.Tokenizer", 5]
)
@pytest.mark.parametrize("form", ["llama2", "llama3"])
def test_ids_are_those_of_tokenizer_json_whatever_class_stands_beside_it(kind, form, tmp_path):
    """transformers 5 takes LlamaTokenizer's own splitting of spaces instead."""
    rust = made(form)
    ours = load_tokenizer(write(tmp_path, rust, FORMS[form][3] | {"tokenizer_class": kind}))
    for text in (" true", *TEXTS):
        ids = rust.encode(text).ids
        assert ours.encode(text) == ids and ours.decode(ids, False) == rust.decode(ids, False)


def test_tokens_that_only_the_other_files_name_are_added_in_transformers_order(tmp_path):
    def like(content, **flags):
        off = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        return {"content": content, "normalized": True} | off | flags

    old = {
        "special_tokens_map.json": {"pad_token": "[PAD]", "eos_token": like("<end>"), "bos_token": "<s>"},
        "added_tokens.json": {"<b>": 901, "<a>": 900, "[PAD]": 902},
    }
    texts = ("a <a> b<b> [PAD]<end> <x> true<new>", *TEXTS)
    decoder = {"902": like("<new>", normalized=False, special=False), "901": like("<b>", special=True)}
    decoder |= {"900": like("<a>", lstrip=True)}
    new = {"bos_token": "<s>", "eos_token": "<new>", "extra_special_tokens": ["<x>"]}
    for name, config in (
        ("old", {"bos_token": "</s>", "unk_token": "<unk>"}),
        ("new", new | {"added_tokens_decoder": decoder}),
    ):
        (tmp_path / name).mkdir()
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        same(write(tmp_path / name, made("llama2"), config, **old), texts)
    same(write(tmp_path, made("gpt2"), {"split_special_tokens": True} | FORMS["gpt2"][3]))


def test_a_folder_that_names_no_tokens_has_those_of_its_config(tmp_path):
    """As GPT-2's: transformers has them in the class."""
    files = {
        "config.json": {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 10**12}
    }
    ours = load_tokenizer(write(tmp_path, made("gpt2"), {"model_max_length": 1024}, **files))
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert (ours.bos_id, *ours.eos_ids) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.named == {"bos_token": END, "eos_token": END}


@pytest.mark.parametrize(
    "kind, form, bos", [("GPT2Tokenizer", "gpt2", True), ("Qwen2TokenizerFast", "qwen2", False)]
)
def test_vocabulary_and_merges_stand_for_tokenizer_json(kind, form, bos, tmp_path):
    """As OPT publishes them."""
    rust = made(form)
    config = FORMS[form][3] | {"tokenizer_class": kind, "add_bos_token": bos}
    write(tmp_path, rust, config)
    rust.model.save(str(tmp_path))
    merges = (tmp_path / "merges.txt").read_text()
    (tmp_path / "merges.txt").write_text(
        merges if merges.startswith("#version") else f"#version: 0.2\n{merges}"
    )
    (tmp_path / "tokenizer.json").unlink()
    same(tmp_path)
    assert load_tokenizer(tmp_path).encode("the cat")[0] == 0 or not bos


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.json"])
def test_other_vocabularies_alone_are_refused_in_a_line_with_the_way_out(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=r"has no tokenizer.json.*AutoTokenizer.*save_pretrained"):
        load_tokenizer(tmp_path)


NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools"}]
MORE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    "config, files",
    [
        ({"chat_template": CHATML}, {}),
        ({"chat_template": NAMED}, {}),
        ({"chat_template": "other"}, {"chat_template.jinja": CHATML}),
        ({}, {"chat_template.jinja": CHATML, MORE: "tools"}),
        ({"chat_template": "other"}, {MORE: "tools"}),
        ({}, {"chat_template.json": {"chat_template": CHATML}}),
        ({}, {}),
    ],
)
def test_chat_templates_are_those_of_transformers(config, files, tmp_path):
    """transformers reads chat_template.json as a processor's."""
    ours = load_tokenizer(write(tmp_path, made("llama3"), FORMS["llama3"][3] | config, **files))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    theirs = files["chat_template.json"]["chat_template"] if "chat_template.json" in files else theirs
    assert ours.templates == (theirs if isinstance(theirs, dict) else {"default": theirs} if theirs else {})
    chat = [{"role": "user", "content": "the cat"}]
    if ours.templates.get("default"):
        want = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
            chat, chat_template=CHATML
        )["input_ids"]
        assert ours.encode_chat(chat, False) == want
    else:
        with pytest.raises(UsageError):
            ours.encode_chat(chat, False)


@pytest.mark.parametrize("template", [5, [5], [{"name": "default"}], {"default": "x"}])
def test_a_chat_template_of_another_form_is_refused(template, tmp_path):
    with pytest.raises(UsageError, match="chat_template must be a text or a list"):
        load_tokenizer(write(tmp_path, made("gpt2"), {"chat_template": template}))
