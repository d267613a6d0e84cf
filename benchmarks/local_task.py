"""A task for lm-eval with texts from this repository: the last word of passages of the demo's corpus.

The metrics are LAMBADA's: how often a model's likeliest continuation is the passage's last word, and the
probability of that word. The passages come from documents held out from training.
"""

# pyright: reportMissingImports=false
import json
import lzma
from pathlib import Path

from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.distill.data.sources import split_of

NAME, COUNT, WORDS = "swiftkv_last_word", 200, 60
_METRICS = [{"metric": "acc"}, {"metric": "perplexity", "aggregation": "perplexity"}]


def passages(count: int) -> list[dict[str, str]]:
    """Beginnings of at most `count` held-out documents of the corpus, each as its context and its last
    word."""
    with lzma.open(DEMO / "corpus.jsonl.xz", "rt") as lines:
        documents = [json.loads(line) for line in lines]
    held_out = [each["text"] for each in documents if split_of(each["id"]) == "held_out"]
    cut = (text.split()[:WORDS] for text in held_out[:count])
    return [{"context": " ".join(words[:-1]), "word": words[-1]} for words in cut if len(words) > 1]


def write(folder: Path, count: int = COUNT) -> str:
    """Write the task's texts and its description; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{NAME}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in passages(count)), encoding="utf-8")
    files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    task = {"task": NAME, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    task |= {"num_fewshot": 0, "output_type": "loglikelihood", "metric_list": _METRICS}
    task |= {"doc_to_text": "{{context}}", "doc_to_target": " {{word}}"}
    (folder / f"{NAME}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return str(folder)


def ask(model: str, folder: str) -> dict[str, float]:
    """A model's metrics from lm-eval."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from swiftkv_jax import lm_eval as ours

    asked = ours.SwiftKV(model, max_length=1024)
    manager = TaskManager(include_path=folder, include_defaults=False)
    found = simple_evaluate(asked, tasks=[NAME], task_manager=manager, bootstrap_iters=0)["results"][NAME]
    return {name.split(",")[0]: value for name, value in found.items() if isinstance(value, float)}
