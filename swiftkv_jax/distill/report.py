"""The human-readable output of a run: a plot of the loss, a one-page report, and its export's model card."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from swiftkv_jax.analysis import plots
from swiftkv_jax.analysis.flops import cache_bytes_per_token, prompt_gflop
from swiftkv_jax.common.errors import explained
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.distill.answers import Compared
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.version import __version__

LIBRARY = "swiftkv-jax"
_METHODS = {
    "swiftkv": "[SwiftKV](https://arxiv.org/abs/2410.03960)",
    "kv-prediction": "[KV prediction](https://arxiv.org/abs/2410.08391)",
}


def metrics_of(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; if a step was repeated after a kill, the later row."""
    path = run / "metrics.jsonl"
    with explained(f"read {path}"):
        lines = path.read_text(encoding="utf-8").splitlines()
    rows: dict[tuple[int, bool], dict] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a kill cut it short
            continue
        evaluated = any(name.startswith("eval/") for name in row)
        rows.pop((row["step"], evaluated), None)
        rows[row["step"], evaluated] = row
    return sorted(rows.values(), key=lambda row: row["step"])


class Outcome(NamedTuple):
    """A finished student, for its report and its model card.

    Attributes:
      evaluation: as `Run.evaluate` has it. longest: tokens of the longest piece that was evaluated at each
        context length, or would have been. answers: to held-out prompts, if they were asked for.
    """

    experiment: Experiment
    model: Transformer | Predicted
    evaluation: dict[str, float]
    longest: Mapping[int, int] = MappingProxyType({})
    answers: Compared | None = None


def about(model: Transformer | Predicted, context: int) -> list[tuple[str, str]]:
    """(quantity, value) pairs of a student relative to its teacher, at prompts of `context` tokens."""
    if isinstance(model, Predicted):
        small, large = model.auxiliary.config.num_layers, model.base.config.num_layers
        return [("method", f"KV prediction: {small} layers read prompts for {large}")]
    config, plan = model.config, model.plan
    if not plan.skipped_layers:
        return [("layers", str(config.num_layers))]
    full = config.plan()
    flops = prompt_gflop(config, plan, context) / prompt_gflop(config, full, context)
    cache = cache_bytes_per_token(config, plan) / cache_bytes_per_token(config, full)
    shared = max(len(plan.readers(row)) for row in range(plan.num_rows))
    last = f", the last {plan.tail} all" if plan.tail else ""
    rows = [
        ("prompt tokens run", f"{plan.depth} of {config.num_layers} layers" + last),
        ("prompt FLOPs in the layers", f"{flops:.0%} of the teacher's, at {context:,} tokens"),
        ("cache bytes per token", f"{cache:.0%} of the teacher's"),
    ]
    return rows + ([("AcrossKV", f"up to {shared} layers share a row")] if shared > 1 else [])


def too_short(length: int, longest: int) -> str:
    """What is said of a context length that no held-out document has."""
    return f"not evaluated at {length:,} tokens: the longest of the held-out documents has {longest:,}"


def quality(outcome: Outcome) -> list[str]:
    """The held-out evaluation as a Markdown table, a row for each context length."""
    evaluation = outcome.evaluation
    lengths = list(dict.fromkeys(name.rpartition("/")[0] for name in evaluation))
    figures = list(dict.fromkeys(name.rpartition("/")[2] for name in evaluation))
    if not evaluation:
        return ["The student was not evaluated: the run had no held-out data."]
    named = any(lengths)
    lines = [f"| {'context | ' if named else ''}{' | '.join(figures).replace('_', ' ')} |"]
    lines.append("|---" * (len(figures) + named) + "|")
    for length in lengths:
        cells = [evaluation.get(f"{length}/{figure}" if length else figure) for figure in figures]
        shown = [f"{cell:.4f}" if cell is not None else "" for cell in cells]
        lines.append(f"| {f'{length} | ' if named else ''}{' | '.join(shown)} |")
    for length, tokens in outcome.longest.items() if named else ():
        if str(length) not in lengths:
            lines += ["", f"{too_short(length, tokens).capitalize()}."]
        elif tokens < length:
            lines += ["", f"The longest document that was evaluated at {length:,} tokens has {tokens:,}."]
    return lines


def page(outcome: Outcome, rows: list[dict], device: str) -> str:
    """The report of a finished run, in Markdown; `rows` as `metrics_of` gives them, the device by name."""
    e, steps = outcome.experiment, [row for row in rows if "loss" in row]
    seconds = sum(row["step_seconds"] for row in steps)
    facts = [
        ("teacher", e.model or "random weights"),
        *about(outcome.model, e.data.seq_len),
        ("data", ", ".join(e.data.sources)),
        ("steps", f"{len(steps):,} of {e.data.batch_size} x {e.data.seq_len} tokens"),
        ("tokens that counted", f"{sum(row['tokens'] for row in steps):,.0f}"),
        ("time in steps", f"{seconds:,.0f} s on {device}"),
        ("made by", f"{LIBRARY} {__version__}"),
    ]
    if steps:
        facts.insert(-1, ("loss", f"{steps[0]['loss']:.4f} at first, {steps[-1]['loss']:.4f} at last"))
    lines = [f"# {e.name}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]
    lines += ["", "## Quality on held-out data, in nats per token", "", *quality(outcome)]
    lines += ["", *outcome.answers.page(pairs=True)] if outcome.answers else []
    lines += ["", "![loss by step](loss.png)", "", "## Use", "", "    swiftkv serve export --http", ""]
    lines += ["config.json has every setting, metrics.jsonl every step."]
    return "\n".join(lines) + "\n"


def card(outcome: Outcome, license: str | None) -> str:
    """The README.md of an export: a model card as the Hugging Face hub reads it."""
    from huggingface_hub import ModelCardData

    e, model = outcome.experiment, outcome.model
    kind = "swiftkv" if model.plan.skipped_layers else ""
    kind = "kv-prediction" if isinstance(model, Predicted) else kind
    known = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", e.model) is not None and not Path(e.model).exists()
    data = ModelCardData(
        base_model=e.model if known else None,
        datasets=[match[1] for s in e.data.sources if (match := re.match(r"hf://([^\[\]:@]+)", s))] or None,
        library_name=LIBRARY,
        license=license,
        pipeline_tag="text-generation",
        tags=[tag for tag in (kind, "jax", "distillation" if kind == "swiftkv" else "") if tag],
    )
    lines = ["---", data.to_yaml(), "---", "", f"# {e.name}", ""]
    if kind:
        teacher = f"[{e.model}](https://huggingface.co/{e.model})" if known else "its teacher"
        lines += [f"A {_METHODS[kind]} student of {teacher}, made with {LIBRARY} {__version__}.", ""]
    lines += [f"* {name}: {value}" for name, value in about(model, e.data.seq_len)]
    lines += ["", "## Quality on held-out data, in nats per token", "", *quality(outcome), ""]
    lines += [*outcome.answers.page(), ""] if outcome.answers else []
    lines += ["## Use", "", f"    pip install {LIBRARY}[serve]", "    swiftkv serve DIR --http", ""]
    if kind == "swiftkv":
        lines += [
            "Or in PyTorch, with the code that this folder carries: "
            "`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`."
        ]
    return "\n".join(lines) + "\n"


def license_of(folder: Path | None) -> str | None:
    """The license in the model card of a teacher's folder, if there is a readable one."""
    from huggingface_hub import ModelCard

    if folder is None or not (folder / "README.md").is_file():
        return None
    try:
        card = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    except Exception:  # not our file: it may be in any state
        return None
    name = card.data.to_dict().get("license")
    return name if isinstance(name, str) else None


def write(run: Path, outcome: Outcome, device: str, teacher: Path | None) -> None:
    """Write loss.png, report.md and answers.json into a run's folder, README.md into its export."""
    with explained(f"write to {run}"):
        rows = metrics_of(run)
        plots.training(rows, run / "loss.png")
        (run / "report.md").write_text(page(outcome, rows, device), encoding="utf-8")
        if outcome.answers:
            (run / "answers.json").write_text(outcome.answers.as_json(), encoding="utf-8")
        text = card(outcome, license_of(teacher))
        (run / "export" / "README.md").write_text(text, encoding="utf-8")
