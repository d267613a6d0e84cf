"""One conversion of messages: data, `LLM.chat`, batches and HTTP read a chat as the same tokens."""

import datetime
import decimal
import json
import re
import uuid

import http_server
import pytest
import tiny_engine as tiny
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_made import CHATML, make_tokenizer
from transformers import AutoTokenizer

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.distill.data.forms import BadRow, parse_row
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.server import jobs
from swiftkv_jax.text.messages import conversation
from swiftkv_jax.text.tokenizer import load_tokenizer

# As published ones: the arguments are an object, the thought has one of several names.
TOOLS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v | tojson }}, {% endfor %}){% endfor %}"
    "{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TWO_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user'] %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
ASKED = {"role": "user", "content": "time?"}


def called(arguments, **fields) -> dict:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | fields


class Paths:
    """The ways by which a chat becomes tokens: an LLM, its server, and a file for rows and lines."""

    def __init__(self, llm: LLM, server: http_server.Running, file, known):
        self.llm, self.server, self.file, self.known = llm, server, file, known

    def under(self, template: str) -> None:
        self.known.chat_template = self.llm.tokenizer.templates["default"] = template
        vars(self.llm.tokenizer).pop("template", None)

    def trained_on(self, messages) -> list[int]:
        chat = parse_row({"messages": messages}).messages
        ids = self.llm.tokenizer.encode_chat(chat, False)
        if any(turn["role"] == "assistant" for turn in chat):
            assert self.llm.tokenizer.assistant_mask(chat)[0] == ids
        return ids

    def asked_over_http(self, messages, opened: bool) -> list[int]:
        answer = self.server.http.post(
            "/tokenize", json={"messages": messages, "add_generation_prompt": opened}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    def asked_in_python(self, messages) -> list[int]:
        return list(self.llm.request({"messages": messages}).token_ids)

    def asked_in_a_batch(self, messages) -> list[int]:
        self.file.write_text(json.dumps({"messages": messages}) + "\n")
        lines = jobs.read_lines(str(self.file))
        [job] = jobs.make_jobs(lines, self.llm.defaults, 0, self.llm, False, print)
        return list(job.work.token_ids)

    def want(self, messages, opened: bool) -> list[int]:
        return self.known.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False)

    def refuses(self, messages, said: str | None = None) -> None:
        """Every way does."""
        for way in (self.trained_on, self.asked_in_python, self.asked_in_a_batch):
            with pytest.raises((UsageError, BadRow), match=said):
                way(messages)
        for route in ("/tokenize", "/v1/chat/completions"):
            answer = self.server.http.post(route, json={"messages": messages})
            assert answer.status_code == 400
            assert re.search(said or "", http_server.error_of(answer)["message"])

    def check(self, messages, same) -> None:
        """Every way gives the tokens that transformers makes of `same`."""
        assert self.trained_on(messages) == self.asked_over_http(messages, False) == self.want(same, False)
        opened = self.asked_over_http(messages, True)
        assert opened == self.want(same, True)
        assert self.asked_in_python(messages) == self.asked_in_a_batch(messages) == opened


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("messages"), TOOLS)
    model = tiny.make_model(KVPlan.swiftkv(2, 1), num_layers=2, vocab_size=300, max_position_embeddings=2**14)
    sizes: dict = http_server.SIZES | {"max_model_len": 2**13}
    llm = LLM.from_model(*model, load_tokenizer(folder), **sizes)
    with http_server.Running(llm, warm_up=False) as server:
        yield Paths(llm, server, folder / "rows.jsonl", AutoTokenizer.from_pretrained(folder))


WORD = st.text(st.sampled_from("ab é漢🙂\n{%\"'"), max_size=6)
SAID = WORD.map(lambda word: f"x{word}x")  # a template may leave out a message that says nothing
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(WORD, JSON, max_size=3)
NOTHING = st.sampled_from([None, "", "  ", "null", " null\n", "{}", {}, '"{}"'])
# (arguments as a client gives them, as a template reads them)
ARGUMENTS = (
    OBJECT.map(lambda value: (value, value))
    | OBJECT.map(lambda value: (json.dumps(value), value))
    | OBJECT.map(lambda value: (json.dumps(json.dumps(value)), value))
    | NOTHING.map(lambda value: (value, {}))
)


@st.composite
def turns(draw):
    """(a message as a client gives it, as a template reads it)."""
    role = draw(st.sampled_from(["user", "assistant", "tool", "developer", "system", "critic"]))
    content = draw(SAID)
    cut = draw(st.integers(0, len(content)))
    parts = [{"type": "text", "text": text} for text in (content[:cut], content[cut:])]
    given = {"role": role, "content": draw(st.sampled_from([content, parts]))}
    read = {"role": "system" if role == "developer" else role, "content": content}
    beside = {"name": None, "weight": draw(JSON), "reasoning_content": draw(WORD), "tool_calls": None}
    if role == "assistant" and draw(st.booleans()):
        pairs = draw(st.lists(ARGUMENTS, min_size=1, max_size=2))
        given |= called(None, content=draw(st.sampled_from([content, parts])))
        if draw(st.booleans()):
            given, read = given | {"content": None}, read | {"content": ""}
        kinds = [[{"function": {"name": "now", "arguments": pair[i]}} for pair in pairs] for i in (0, 1)]
        given, read = given | {"tool_calls": kinds[0]}, read | {"tool_calls": kinds[1]}
        beside.pop("tool_calls")
    chosen = draw(st.sets(st.sampled_from(sorted(beside))))
    given |= {name: value for name, value in beside.items() if name in chosen}
    return given, read | {k: v for k, v in given.items() if k == "reasoning_content"}


# The server's threads draw random numbers meanwhile, which is not the strategies' doing.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@given(st.lists(turns(), min_size=1, max_size=5))
def test_a_chat_is_the_same_tokens_however_it_comes(paths, pairs):
    paths.under(TOOLS)
    messages, same = map(list, zip(*pairs, strict=True))
    paths.check(messages, same)
    once = conversation(messages, "x")
    assert conversation(once, "x") == once


@pytest.mark.parametrize("arguments", ["[" * 600, "[" * 100 + "]" * 100, "tz=UTC", "{'tz': 1}"])
def test_arguments_that_are_no_json_are_the_text_that_came(paths, arguments):
    each = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}, {% endfor %}"
    paths.under(TOOLS.replace(each, "{{ c.function.arguments }}"))
    paths.check([ASKED, called(arguments)], [ASKED, called(arguments, content="")])


def test_a_developer_is_the_system_only_where_the_template_names_none(paths):
    messages = [{"role": "developer", "content": "BE BRIEF"}, ASKED]
    paths.under(TWO_ROLES)
    paths.check(messages, [messages[0] | {"role": "system"}, ASKED])
    paths.under(TWO_ROLES.replace("'system'", "'system', 'developer'"))
    paths.check(messages, messages)


@pytest.mark.parametrize(
    "template, turn",
    [
        (TWO_ROLES, {"role": "critic", "content": "time?"}),  # although another message says the same
        (TWO_ROLES, {"role": "critic", "content": "t"}),
        (CHATML, called("{}")),
        (
            "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
            "{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}|{{ messages[-1].content }}",
            {"role": "system", "content": "first"},
        ),
    ],
)
def test_a_message_that_leaves_no_trace_is_refused_by_its_number_and_role(paths, template, turn):
    paths.under(template)
    messages = [{"role": "system", "content": "s"}, turn, {"role": "system", "content": "time"}, ASKED]
    messages = messages if template != TWO_ROLES else messages[:2] + messages[3:]
    lost = 0 if "namespace" in template else 1
    paths.refuses(messages, f"message {lost}, .*'{messages[lost]['role']}'")


@pytest.mark.parametrize(
    "template",
    [
        TOOLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim | upper }}"),
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        # Only one of content and calls is shown, and contents are checked.
        "{% for m in messages %}{% if m.content and m.content[0] not in 'otT<' %}{{ raise_exception('bad') }}"
        "{% endif %}{% if m.tool_calls %}{{ m.tool_calls }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_message_of_which_something_is_there_is_taken(paths, template):
    paths.under(template)
    messages = [ASKED, called({"tz": 1}, content="one moment"), ASKED | {"content": ""}]
    messages += [{"role": "assistant", "content": "thought</think>"}]
    messages += [{"role": "tool", "content": "</think>12:00"}]
    assert paths.asked_in_python(messages) == paths.asked_over_http(messages, True)


FIELDS = (
    *(
        datetime.datetime(2023, 4, 9),
        datetime.timedelta(1),
        b"\xff",
        decimal.Decimal("1.5"),
        uuid.UUID(int=5),
    ),
    *({"at": [datetime.date(2023, 4, 9), object()]}, float("nan"), {1: 2}),
)


def test_a_field_that_json_cannot_say_is_no_error(paths):
    """As parquet has them, beside a turn and within one."""
    paths.under(TOOLS)
    for field in FIELDS:
        messages = [ASKED | {"at": field}, called({"at": field}) | {"at": field}]
        document = parse_row({"conversation": messages})
        read = document.messages and list(document.messages)
        assert document == parse_row({"conversation": read})
        json.dumps(document.messages, allow_nan=False)
        assert paths.trained_on(messages) == paths.trained_on(read)
        assert paths.asked_in_python(messages)


def test_levels_without_end_and_other_parts_than_texts_are_refused(paths):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for messages in ([ASKED | {"at": deep}], [ASKED, called({"at": deep})]):
        with pytest.raises(BadRow):
            parse_row({"messages": messages})
        with pytest.raises(UsageError):
            paths.asked_in_python(messages)
    for kind in ("image_url", "input_audio", "refusal"):
        parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]
        paths.refuses([ASKED | {"content": parts}])
