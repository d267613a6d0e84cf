"""A model's folder may be an enemy's: it loads rightly or is refused in a line, and nothing else happens."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from patience import no_longer_than
from tiny_models import tiny
from tokenizers_made import CHATML, make_tokenizer

from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import inside, read_json
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.text.template import SECONDS, Template
from swiftkv_jax.text.tokenizer import load_tokenizer

HERE = Path(__file__).parent
SHAPE = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "head_dim": 8}
CONFIG = ModelConfig(**SHAPE, num_heads=2, num_kv_heads=1)
MOST_SECONDS = 20.0  # of the processor's time for one folder: nothing hangs; the slowest takes about 2
MOST_GROWTH = 256  # MiB, over all folders
PATIENCE = 60.0  # seconds of the clock for a chat that should end after SECONDS of the processor's time


def make_good(work: Path) -> None:
    """`good/plain` and `good/swift`, the second in several files; `outside`, one more of each file."""
    plans = {"plain": KVPlan.standard(2), "swift": KVPlan.swiftkv(2, 1)}
    for name, plan in plans.items():
        folder = make_tokenizer(work / "good" / name, CHATML)
        model, params = tiny(CONFIG, plan)
        size = {"max_shard_bytes": 4000} if name == "swift" else {}
        save_pretrained(folder, model, jax.tree.map(np.asarray, params), **size)
        (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.5}')
    (work / "outside").mkdir()
    for folder in (work / "good").iterdir():
        for path in folder.iterdir():
            shutil.copy(path, work / "outside" / path.name)


@pytest.mark.slow("100")
@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_spoilt_folders_load_rightly_or_are_refused(tmp_path, count):
    """They are loaded, or refused in a line; nothing but loading and refusing may happen."""
    make_good(tmp_path)
    command = [sys.executable, "-X", "faulthandler", str(HERE / "load_spoilt.py")]
    command += [str(tmp_path), "0", str(count)]
    paths = [str(HERE), str(HERE.parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=7200)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert done.returncode == 0 and len(lines) == count + 1, (lines[-1:], done.stderr[-3000:])
    *found, whole = lines
    for key in ("failure", "opened", "started", "imported", "ran"):
        wrong = [(line["seed"], line["what"], line[key]) for line in found if line[key]]
        assert not wrong, (key, len(wrong), wrong[:10])
    slow = [(line["seed"], line["what"], line["seconds"]) for line in found if line["seconds"] > MOST_SECONDS]
    assert not slow, slow[:10]
    assert whole["grown_mib"] <= MOST_GROWTH
    refused = sum(bool(line["said"]) for line in found)
    assert count // 4 < refused < count, "both kinds are among them"


DOUBLING = "{% set n = namespace(a='x') %}{% for i in range(64) %}{% set n.a = n.a ~ n.a %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 900000000 }}",
        DOUBLING,
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('two\nlines') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_takes_too_much_is_refused_and_the_next_chat_goes_on(source):
    bad, good = Template(source), Template("{{ messages[0] }}!")
    before = os.times()
    with no_longer_than(PATIENCE, bad), pytest.raises(UsageError):
        bad.render({"messages": ["x"]})
    bad.close()  # waits for its process, so that its time is counted
    assert sum(os.times()[:4]) - sum(before[:4]) < 2 * SECONDS + 0.5, "what the second limit allows"
    bad.source = good.source
    assert bad.render({"messages": ["x"]}) == good.render({"messages": ["x"]}) == ("x!", [])
    bad.close(), good.close()


@pytest.mark.parametrize("stuck, seconds", [("while True: pass", 3.0), ("time.sleep(600)", 1.0)])
def test_a_process_whose_own_timer_never_fires_is_ended_all_the_same(tmp_path, monkeypatch, stuck, seconds):
    """The first uses the processor, and its time is counted; the second waits, and the clock runs."""
    worker = tmp_path / "worker.py"
    worker.write_text(f"import sys, time\nsys.stdin.readline()\n{stuck}\n")
    monkeypatch.setattr("swiftkv_jax.text.template._WORKER", worker)
    if "sleep" in stuck:
        monkeypatch.setattr("swiftkv_jax.text.template.PATIENCE", seconds)
    template = Template("{{ messages }}")
    before = os.times()
    with no_longer_than(PATIENCE, template), pytest.raises(UsageError):
        template.render({"messages": "a"})
    assert sum(os.times()[:4]) - sum(before[:4]) < seconds


def test_a_process_that_was_killed_is_replaced():
    template = Template("{{ messages }}")
    template.render({"messages": "a"})
    process = template.process
    process.kill()
    process.wait()
    assert template.render({"messages": "b"}) == ("b", [])
    process = template.process
    del template
    assert process.returncode, "it ends with its object"


def test_links_may_lead_into_the_folder_or_the_hubs_blobs_only(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text('{"a": 1}')
    (tmp_path / "secret").write_text('{"a": 2}')
    snapshot, plain = tmp_path / "snapshots" / "1", tmp_path / "plain"
    for folder in (snapshot, plain):
        folder.mkdir(parents=True)
        (folder / "real.json").write_text('{"a": 3}')
        (folder / "inner.json").symlink_to("real.json")
        assert read_json(folder / "inner.json") == {"a": 3}
        for name, target in (("out", tmp_path / "secret"), ("null", "/dev/null"), ("loop", "loop.json")):
            (folder / f"{name}.json").symlink_to(target)
            with pytest.raises(UsageError):
                read_json(folder / f"{name}.json")
        os.mkfifo(folder / "pipe.json")
        with pytest.raises(UsageError):
            inside(folder / "pipe.json")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_json(snapshot / "config.json") == {"a": 1}
    (plain / "config.json").symlink_to("../blobs/abc")
    with pytest.raises(UsageError):
        read_json(plain / "config.json")


@pytest.mark.parametrize("kind", ["BertTokenizer", "evil.Tokenizer", "MistralCommonBackend", 5, ["x"]])
def test_a_tokenizers_class_is_not_even_looked_up(tmp_path, kind):
    before = load_tokenizer(make_tokenizer(tmp_path)).fingerprint
    file = tmp_path / "tokenizer_config.json"
    fields = {"tokenizer_class": kind, "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert load_tokenizer(tmp_path).fingerprint == before


def test_a_linked_folder_of_chat_templates_is_refused(tmp_path):
    folder = make_tokenizer(tmp_path / "folder")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "tool_use.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError, match="additional_chat_templates"):
        load_tokenizer(folder)
