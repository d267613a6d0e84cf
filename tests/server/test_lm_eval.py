"""lm-eval both ways: in process, through its own client of our server, and its `hf` model as the reference.

Needs `pip install 'swiftkv-jax[eval]'`; skipped without.
"""

import importlib
import json
import math
import shlex
import sys

import http_server
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'swiftkv-jax[eval]'")
pytest.importorskip("tenacity", reason="lm-eval's client is not installed: pip install 'lm_eval[api]'")

import jax
import jax.numpy as jnp
from documents import Code, shell
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

import swiftkv_jax as skv
from swiftkv_jax import lm_eval as ours
from swiftkv_jax.checkpoint.adapter import save_adapter
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core import predict
from swiftkv_jax.engine.llm import LLM

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

CONTEXT = 96  # of the in-process models; see the module's docstring for the client's +2
ROOT = http_server.Path(__file__).parents[2]
TEXT = (
    "The module provides a class which, if the file does not exist, raises an error. Each call returns a "
    "list of the names that were found, in the order of the search path, and the last one wins.\n"
)
CHOICES = [
    # The first choices of these two are what the model writes by itself.
    {"context": "If the file does not exist, an", "choices": ["\nexception is", " apple", " exception"]},
    {"context": "The module provides", "choices": [" a module", " a modern that"]},
    {"context": "This function returns a list of ", "choices": ["strings", "the following", "x"]},
    {"context": TEXT * 3 + "The module", "choices": [" provides access to", " zzz"]},  # longer than CONTEXT
    {"context": "", "choices": ["The", " the"]},
]
DOCUMENTS = [{"text": "x"}, {"text": TEXT}, {"text": TEXT * 4}]  # one token, one window, several windows
PROMPTS = [{"context": "The module provides"}, {"context": "Changed in version 3.8:"}, {"context": "def f("}]
GENERATE = {"until": ["\n", " the"], "max_gen_toks": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The demo's teacher and a student of it with random weights' quality, in float32."""
    root = tmp_path_factory.mktemp("models")
    model, params = skv.from_pretrained(ROOT / "demo" / "teacher", dtype="float32")
    half = skv.KVPlan.swiftkv(model.config.num_layers, model.config.num_layers // 2, 2)
    pairs = {"standard": (model, params), "student": skv.to_swiftkv(model, params, half)}
    for name, pair in pairs.items():
        skv.save_pretrained(root / name, *pair, source=ROOT / "demo" / "teacher")
    return root


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with three tasks: multiple choice, rolling perplexity, and generation."""
    root = tmp_path_factory.mktemp("tasks")
    rows = {
        "choice": [row | {"label": 0} for row in CHOICES],
        "rolling": DOCUMENTS,
        "write": [row | {"answer": ""} for row in PROMPTS],
    }
    choice = {"output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices"}
    choice |= {"doc_to_target": "label", "target_delimiter": "", "metric_list": ["acc", "acc_norm"]}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    rolling |= {"metric_list": ["byte_perplexity", "word_perplexity"]}
    write = {"output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{answer}}"}
    write |= {"generation_kwargs": GENERATE, "metric_list": ["exact_match"]}
    for (name, lines), kind in zip(rows.items(), (choice, rolling, write), strict=True):
        data = root / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(root / "cache")}
        config = {"task": f"tiny_{name}", "dataset_path": "json", "dataset_kwargs": source}
        config |= {"test_split": "test", "num_fewshot": 0} | kind
        config["metric_list"] = [{"metric": metric} for metric in kind["metric_list"]]
        (root / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return root


def evaluate(tasks, by, names=("choice", "rolling", "write"), /, **args) -> dict:
    """Every answer and every metric of the tiny tasks, by one of lm-eval's models."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    wanted = [f"tiny_{name}" for name in names]
    out = simple_evaluate(by, args, tasks=wanted, task_manager=manager, bootstrap_iters=0, verbosity="ERROR")
    rows = ((task, key, value) for task, row in out["results"].items() for key, value in row.items())
    answers = {}
    for task, samples in out["samples"].items():
        samples = sorted(samples, key=lambda sample: sample["doc_id"])
        answers[task] = [[response[0] for response in sample["resps"]] for sample in samples]
    return {"metrics": {(t, k): v for t, k, v in rows if isinstance(v, float)}, "answers": answers}


@pytest.fixture(scope="module")
def in_process(folders, tasks):
    """Results of `swiftkv`, named as on the command line; one load for all tests of the standard model."""
    return evaluate(tasks, "swiftkv", pretrained=str(folders / "standard"), max_length=CONTEXT)


def check_same(got: dict, want: dict) -> None:
    """The same sums to 1e-3 nats a text, the same choices, the same words."""
    assert got["tiny_write"] == want["tiny_write"] and all(text for (text,) in got["tiny_write"])
    for mine, other in zip(got["tiny_choice"], want["tiny_choice"], strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
        assert [ll for ll, _ in mine] == pytest.approx([ll for ll, _ in other], abs=1e-3)
    assert np.ravel(got["tiny_rolling"]) == pytest.approx(np.ravel(want["tiny_rolling"]), abs=1e-3)


def test_in_process_equals_transformers(folders, tasks, in_process):
    """lm-eval's own `hf` model on the same folder; with contexts cut off on the left and texts of several
    windows among them."""
    pytest.importorskip("accelerate", reason="lm-eval's hf model is not installed: pip install 'lm_eval[hf]'")
    how = {"pretrained": str(folders / "standard"), "max_length": CONTEXT, "dtype": "float32"}
    theirs = evaluate(tasks, "hf", **how, device="cpu", batch_size=1)
    check_same(in_process["answers"], theirs["answers"])
    assert in_process["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4)
    assert [row[0][1] for row in in_process["answers"]["tiny_choice"][:3]] == [True, True, False]


@pytest.fixture(scope="module")
def serving(folders):
    """The server over the same folder, with the context that its client wants for windows of CONTEXT."""
    llm = LLM(folders / "standard", max_model_len=CONTEXT + 2, max_num_seqs=4)
    with http_server.Running(llm, warm_up=False) as server:
        yield server


def client(server: http_server.Running) -> dict:
    """What `local-completions` is told of a server."""
    url = f"{server.url}/v1/completions"
    return {"model": http_server.NAME, "base_url": url, "max_length": CONTEXT + 2, "max_retries": 1}


@pytest.mark.parametrize(
    "how",
    [{"batch_size": 3}, {"num_concurrent": 2}, {"tokenized_requests": False}],
    ids=["batches", "concurrent", "texts"],
)
def test_the_client_of_servers_gives_the_same_numbers(folders, tasks, in_process, serving, how):
    """`local-completions`, unmodified. Exactly the same: JSON carries every bit of a float."""
    names = ("choice", "rolling", "write")
    if how.get("tokenized_requests") is False:  # a text is cut by tokens only where it is made of them
        names = ("write",)
    how |= {"tokenizer": str(folders / "standard"), "tokenizer_backend": "huggingface", "add_bos_token": True}
    got = evaluate(tasks, "local-completions", names, **client(serving), **how)
    assert got["answers"] == {task: in_process["answers"][task] for task in got["answers"]}
    assert got["metrics"] == {key: in_process["metrics"][key] for key in got["metrics"]}


def test_the_client_may_ask_the_server_to_tokenize(folders, tasks, serving):
    """Told nothing of a tokenizer, the client finds the server's. It sends no BOS, and takes a BOS whose
    id is 0 for none: windows begin with EOS then. Told the same, we give the same numbers."""
    got = evaluate(tasks, "local-completions", ("rolling", "write"), **client(serving))
    how = {"pretrained": str(folders / "standard"), "max_length": CONTEXT}
    mine = evaluate(tasks, "swiftkv", ("rolling", "write"), **how, add_bos_token=False, prefix_token_id=1)
    assert got["answers"] == mine["answers"] and got["metrics"] == mine["metrics"]


def spoken(command: Code) -> str:
    """The kind of model that a command of the documents evaluates, for the name of its test."""
    return "lazy_llm" if "lazy_llm" in command.text else command.text.split("--model ")[1].split()[0]


@pytest.mark.parametrize("command", shell(r"(?!.*gs://)(lm_eval |python -m [\w.]+\.lm_eval )"), ids=spoken)
def test_a_command_of_the_documents_runs(command, folders, tasks, serving, monkeypatch, tmp_path, capsys):
    """On the tiny model, whose context is short, and the task of choices instead of hellaswag, which would be
    downloaded."""
    here = {"NAME": http_server.NAME, "http://127.0.0.1:8000": serving.url, "hellaswag": "tiny_choice"}
    here["add_bos_token=True"] = f"add_bos_token=True,max_length={CONTEXT + 2}"
    text = command.text.replace("DIR", str(folders / "standard"))
    for name, ours_here in here.items():
        text = text.replace(name, ours_here)
    program, *words = shlex.split(text)
    name, given = (words[1], words[2:]) if program == "python" else ("lm_eval.__main__", words)
    run = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *given, "--include_path", str(tasks)])
    assert not (run.main if program == "python" else run.cli_evaluate)()
    assert "tiny_choice" in capsys.readouterr().out


@pytest.fixture(scope="module")
def student(folders):
    return ours.SwiftKV(LLM(folders / "student", max_model_len=CONTEXT))


@pytest.fixture(scope="module")
def oracle(student):
    """log p(next token | the last CONTEXT tokens before it), by the definition of the model."""
    llm = student.llm
    model = llm.model
    params = skv.from_pretrained(llm.tokenizer.name, dtype="float32")[1]
    apply = jax.jit(lambda tokens: jax.nn.log_softmax(model.apply({"params": params}, tokens)[0]))

    def logprobs(inputs: list[int]) -> np.ndarray:
        assert len(inputs) <= CONTEXT
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(inputs)] = inputs
        return np.asarray(apply(jnp.asarray(padded)))[: len(inputs)]

    return logprobs


def test_an_adapter_is_scored_by_its_definition(folders, tasks, tmp_path):
    """Likelihoods are those of the definition; a base that moved is named as an argument of the model."""
    base, params = skv.from_pretrained(folders / "standard", dtype="float32")
    small, kept = skv.layer_pruned(base, params, (0, 1))
    pair = skv.Predicted(base, small, skv.Prediction((0, 1, 1, 1, 1, 1, 1, 1)))
    parts = {"base": params, "auxiliary": kept, "predictor": predict.identity(pair)}
    save_adapter(tmp_path / "pair", pair, parts, base=folders / "standard")
    got = evaluate(tasks, "swiftkv", pretrained=str(tmp_path / "pair"), max_length=CONTEXT)["answers"]
    assert len(got["tiny_write"]) == len(PROMPTS)
    llm = LLM(tmp_path / "pair", base=folders / "standard", max_model_len=CONTEXT)
    asked = [(None, llm.tokenizer.encode(TEXT)[:20], llm.tokenizer.encode(TEXT)[20:24])]
    [(value, _)] = ours.SwiftKV(llm)._loglikelihood_tokens(asked, disable_tqdm=True)
    ids = [*asked[0][1], *asked[0][2]]
    scores = pair.apply({"params": parts}, jnp.asarray([ids]))[0]
    told = jax.nn.log_softmax(scores, axis=-1)[np.arange(19, 23), ids[20:]]
    assert value == pytest.approx(float(told.sum()), abs=1e-3)


def request(kind: str, *args) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


def test_a_baseline_reads_contexts_in_its_own_way(folders):
    """Whole contexts as the model without it; a fifth of them is another text, to score and to continue."""
    from benchmarks.papers import baselines
    from benchmarks.papers.baselines.lm_eval import SwiftKVBaseline

    llm = LLM(folders / "standard", max_model_len=CONTEXT)
    ids = llm.tokenizer.encode(TEXT)
    kinds = ours.SwiftKV(llm), *(SwiftKVBaseline(llm, "random_pruning", keep=keep) for keep in (1.0, 0.2))
    scored, texts = [], []
    for model in kinds:
        scored += model._loglikelihood_tokens([(None, ids[:20], ids[20:26])], disable_tqdm=True)
        asked = [request("generate_until", TEXT, {"max_gen_toks": 24, "do_sample": False})]
        texts += model.generate_until(asked, disable_tqdm=True)
    want, _ = baselines.follow(llm.model, llm.params, kinds[2].system, ids[:20], ids[20:26])
    assert scored[1][0] == pytest.approx(scored[0][0], abs=1e-3) and texts[1] == texts[0]
    assert scored[2][0] == pytest.approx(float(want.sum()), abs=1e-5) and texts[2] != texts[0]
    assert abs(scored[2][0] - scored[0][0]) > 0.1


@pytest.mark.parametrize("length", [1, 95, 96, 97, 150])
def test_a_student_is_scored_by_its_full_depth_definition(student, oracle, length):
    """However long the context, all tokens of the continuation are predicted, by the last tokens before."""
    ids = student.tok_encode(TEXT * 8)
    context, continuation = ids[1 : 1 + length], ids[20:25]
    [(total, greedy)] = student._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    read = (context + continuation)[:-1][-CONTEXT:]
    rows = oracle(read)[-5:]
    assert total == pytest.approx(sum(rows[range(5), continuation]), abs=1e-3)
    assert greedy == (rows.argmax(1).tolist() == continuation)


@pytest.mark.parametrize("length", [1, 96, 97, 193, 250])
def test_rolling_windows_predict_each_token_once_with_the_most_context(student, oracle, length):
    """The result equals windows cut by hand: 96 tokens, the last full, the first behind the prefix token."""
    text = student.llm.tokenizer.decode(student.tok_encode(TEXT * 9)[1:length])
    ids = student.tok_encode(text)
    stream, want, done = [student.prefix_token_id, *ids], 0.0, 0
    while done < len(ids):
        end = min(done + CONTEXT, len(ids))
        window = stream[max(0, end - CONTEXT) : end]
        rows = oracle(window)[-(end - done) :]
        want += float(sum(rows[range(end - done), ids[done:end]]))
        done = end
    [got] = student.loglikelihood_rolling([request("loglikelihood_rolling", text)], disable_tqdm=True)
    assert math.isfinite(got) and got == pytest.approx(want, abs=2e-3)


def test_generation_reads_the_end_of_a_long_context(student):
    """The last C - max_gen_toks tokens; what comes before changes nothing."""
    kept = student.llm.tokenizer.decode(student.tok_encode(TEXT * 3)[-84:])
    assert student.tok_encode(kept)[1:] == student.tok_encode(TEXT * 3)[-84:]
    fronts = ("", TEXT, "Something else. ")
    asked = [request("generate_until", front + kept, dict(GENERATE)) for front in fronts]
    texts = student.generate_until(asked, disable_tqdm=True)
    assert texts[0] and texts[1] == texts[2] == texts[0]


def test_sampling_is_that_of_the_server(student):
    """A task that samples gets its temperature; nothing else is changed by lm-eval's own fields. What means
    nothing or does not fit is an error."""
    given = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "until": "x", "max_gen_toks": 5}
    params = student.sampling(given)
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.7, 0.9, 1234, 5)
    assert params.stop == ("x", student.tokenizer.eos_token)
    assert student.sampling(given | {"do_sample": False}).greedy
    for wrong in ({"num_beams": 4}, {"temprature": 1.0}, {"max_gen_toks": CONTEXT}):
        with pytest.raises(UsageError):
            student.generate_until([request("generate_until", "x", given | wrong)], disable_tqdm=True)
    with pytest.raises(UsageError):
        student._loglikelihood_tokens([(None, [0], [5] * (CONTEXT + 1))], disable_tqdm=True)
    with pytest.raises(UsageError):
        student.llm.score([0] * (CONTEXT + 2))
