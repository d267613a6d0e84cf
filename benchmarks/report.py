"""The tables of the documents, and README's plot, made from benchmarks/results/*.json.

    python -m benchmarks.report

A document has the line `<!-- results: NAME -->` where a table begins and `<!-- end -->` where it ends; the
command replaces the text between them. A result is the output of a benchmark, or a record: the run (command,
hardware, versions, date, and the commit that recorded it), columns and rows.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import RESULTS, table
from benchmarks.serving.report import aggregate

ROOT = Path(__file__).parent.parent
DOCUMENTS = tuple(
    ROOT / name
    for name in ("README.md", "docs/results.md", "docs/choosing_a_split.md", "docs/slim.md", "demo/README.md")
)
PLOT = ROOT / "docs" / "saved.png"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.S)
_WIDTH = 100
Rows = list[list]


def result(name: str) -> dict:
    """The content of benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def records(name: str) -> list[dict]:
    """The rows of a record, by column."""
    found = result(name)
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def caption(found: dict) -> str:
    """Command, hardware, versions, date and commit of a result, as one paragraph."""
    about = found.get("about", found)
    run = about.get("run") or about["machine"] | ({"command": about["command"]} if "command" in about else {})
    parts = [run.get("hardware") or run["device"], run.get("versions") or f"jax {run['jax']}", run["date"]]
    if run.get("commit"):
        parts.append(f"commit {run['commit']}")
    text = f"`{run['command']}`: {', '.join(parts)}."
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def shown(columns: list[str], rows: Rows) -> str:
    """A Markdown table; the floats of a column have the same number of decimals, and None is an empty
    cell."""
    out = [[""] * len(columns) for _ in rows]
    for column in range(len(columns)):
        values = [row[column] for row in rows]
        decimals = max((len(str(v).partition(".")[2]) for v in values if isinstance(v, float)), default=0)
        for cells, value in zip(out, values, strict=True):
            if value is not None:
                cells[column] = f"{value:.{decimals}f}" if isinstance(value, float) else str(value)
    return table(columns, out)


def _latency(found: dict) -> tuple[list[str], Rows]:
    """Ratios to the standard model: of times to first token, and of times per output token."""
    names = {"standard": "standard", "swiftkv": "SwiftKV at 50 %", "acrosskv": "+ 2-way AcrossKV"}
    columns = ["", *(f"TTFT, {n} tokens" for n in found["ttft"])]
    columns += ["TPOT, {} x {}".format(*key.split("x")) for key in found["tpot"]]
    rows = []
    for key, name in names.items():
        row = [round(times[key]["vs_full_depth"], 2) for times in found["ttft"].values()]
        rows.append([name, *row, *(round(times[key]["vs_standard"], 2) for times in found["tpot"].values())])
    return columns, rows


def _peers(found: dict) -> tuple[list[str], Rows]:
    rows = [
        [name, f"{row['tokens_per_s']:,.0f}", round(row["gain"], 2)] for name, row in found["rows"].items()
    ]
    return ["system", "tokens/s", "relative to transformers"], rows


def _throughput(found: dict) -> tuple[list[str], Rows]:
    columns = ["prompt:output", "plan", "tokens/s", "gain", "predicted gain", "cache bytes per token"]
    rows = []
    for lengths, plans in found["workloads"].items():
        for name, row in plans.items():
            gains = (round(row[key], 2) for key in ("gain", "predicted_gain"))
            rows.append([lengths, name, f"{row['tokens_per_s']:,.0f}", *gains, row["cache_bytes_per_token"]])
    return columns, rows


def _waiting(found: dict) -> tuple[list[str], Rows]:
    columns = ["`steps_per_launch`", "TTFT, ms", "TTFT, 95th percentile, ms", "time of these steps, ms"]
    rows = []
    for steps, row in found["steps"].items():
        times = (round(row[name], 1) for name in ("ttft_ms", "ttft_p95_ms", "steps_ms"))
        rows.append([steps, *times, f"{row['tokens_per_s']:,.0f}"])
    return [*columns, "tokens/s of the other lanes"], rows


def _prediction(found: dict) -> tuple[list[str], Rows]:
    """Ratios of a KV prediction pair in engines."""
    first, later = found["ttft"]["pair"], found["tpot"]["pair"]
    columns = ["TTFT / full depth", "TTFT / standard step", "TPOT / standard"]
    ratios = (first["vs_full_depth"], first["vs_standard"], later["vs_standard"])
    return columns, [[f"{ratio:.2f}" for ratio in ratios]]


def _whisper(found: dict) -> tuple[list[str], Rows]:
    names = {"kv": "keys and values", "k": "keys", "x": "inputs"}
    columns = ["windows at once", "cache of", "MB per window", "first token, ms per window", "then tokens/s"]
    rows = [
        [batch, names[form], round(row["cache_mb"], 1), round(row["first_ms"]), round(row["tokens_per_s"])]
        for batch, forms in found["batches"].items()
        for form, row in forms.items()
    ]
    return columns, rows


def _serving(found: dict) -> tuple[list[str], Rows]:
    """Servers with fixed lengths, medians over the rounds."""
    columns = ["prompt:output", "plan", "tokens/s", "gain", "least to most", "TTFT, ms", "TPOT, ms", "failed"]
    names = {"standard": "standard", "swiftkv": "SwiftKV 50 %", "acrosskv": "+ 2-way AcrossKV"}
    points = aggregate(found["runs"], found["about"]["percentile"], "standard")["fixed"]
    rows = []
    for point, systems in points.items():
        for system, row in systems.items():
            gains = round(row["gain"], 2), f"{row['gains'][0]:.2f} to {row['gains'][-1]:.2f}"
            times = f"{row['median_ttft_ms']:,.0f}", round(row["median_tpot_ms"], 1)
            rows.append([point, names[system], f"{row['total_token_throughput']:,.0f}", *gains, *times])
            rows[-1].append(f"{row['failed']} of {row['requests']}")
    return columns, rows


def _summary() -> tuple[list[str], Rows]:
    """README's table: students with their figures at all contexts; times are of their plans on a CPU."""
    students: dict[tuple[str, str], list[dict]] = {}
    for row in records("demo"):
        row["gap"] = round(row["distilled"] - row["teacher's cross-entropy"], 4)
        row["cache"] = f"{row['cache bytes per token'] / 3072:.0%}"
        students.setdefault(("demo, 3.6 M", row["student"]), []).append(row)
    answers = {(row["model"], row["machine"]): row for row in records("smollm2_answers")}
    plans = {"teacher": ("teacher", {"context": 512, "TTFT": 1.0, "cache": "100%"})}
    for model, name, layers, splits in (
        ("SmolLM2-135M", "smollm2", 30, (20, "20, share 2")),
        ("Gemma 3 270M", "gemma3", 18, (12, 9)),
    ):
        for row in records(name):
            split, how = row[f"split, of {layers}"], row["student"]
            before, _, share = str(split).partition(", share ")
            kept = int(before) + -(-(layers - int(before)) // int(share or 1))  # rows of a token's cache
            title = f"SwiftKV, {before} of {layers} layers{share and f' + {share}-way AcrossKV'}"
            row["cache"] = f"{kept / layers:.0%}"
            plans.setdefault(f"split {split}", (title, {k: row[k] for k in ("context", "TTFT", "cache")}))
            if split in splits and how != "rewired":
                asked = answers.get((f"split {split}, {how}", "CPU"), {})
                students.setdefault((model, f"{title}, {how}"), []).append(asked | row)
    for (name, machine), row in answers.items():
        if not name.startswith("split 20") and "tail" not in name:  # which takes longer than its plan
            plan = max((plan for plan in plans if name.startswith(plan)), key=len)
            title, figures = plans[plan]
            students["SmolLM2-135M", f"{title}{name.removeprefix(plan)}, {machine}"] = [row | figures]
    forms = {"context": "{}", "gap": "{:.3f}", "KL": "{:.3f}", "agreement": "{:.3f}", "TTFT": "{:.2f}"}
    rows = []
    for title, found in students.items():
        cells = [" / ".join(form.format(row[key]) for row in found) for key, form in forms.items()]
        rows.append([*title, *cells, found[0].get("cache", "100%"), found[0].get("IFEval, strict", "-")])
    columns = ["model", "student", "context", "gap, nats", "KL, nats", "agreement", "TTFT", "cache", "IFEval"]
    return columns, rows


def _splits() -> tuple[list[str], Rows]:
    """SmolLM2's students by split: the agreement of each way to make one, at 512 tokens."""
    ways = ("rewired", "least squares", "distilled")
    found: dict[int, dict] = {}
    for row in records("smollm2"):
        if isinstance(row["split, of 30"], int) and row["context"] == 512:
            found.setdefault(row["split, of 30"], {})[row["student"]] = row
    rows = [
        [split, by_way["rewired"]["prompt FLOPs"]]
        + [f"{by_way[way]['agreement']:.3f}" if way in by_way else None for way in ways]
        for split, by_way in found.items()
    ]
    columns = ["split", "prompt FLOPs in the layers", "agreement, rewired", "after least squares"]
    return [*columns, "after distillation"], rows


_TABLES: dict[str, Callable[[dict], tuple[list[str], Rows]]] = {
    **{"peers": _peers, "peers_smollm2": _peers, "kv_prediction_latency": _prediction, "latency": _latency},
    **{"serving": _serving, "throughput": _throughput, "waiting": _waiting, "whisper": _whisper},
}
_JOINED = {"summary": _summary, "splits": _splits}


def block(name: str) -> str:
    """The table of one result, and the run that made it; a table of several results has no run."""
    if name in _JOINED:
        return shown(*_JOINED[name]())
    found = result(name)
    made = _TABLES[name](found) if name in _TABLES else (found["columns"], found["rows"])
    return f"{shown(*made)}\n\n{caption(found)}"


def filled(text: str) -> str:
    """A document with its tables updated from the current results."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{block(match[2])}\n\n{match[3]}", text)


def plot(path: Path) -> None:
    """A bar chart of time to first token and of cache bytes, relative to the standard model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    swiftkv, acrosskv = (row for row in records("demo") if row["context"] == 2048)
    names = ["standard model", "SwiftKV, half the layers", "+ 2-way AcrossKV"]
    times = [1.0, swiftkv["TTFT"], acrosskv["TTFT"]]
    size = swiftkv["cache bytes per token"]
    sizes = [1.0, *(row["cache bytes per token"] / size for row in (swiftkv, acrosskv))]
    figure, axes = pyplot.subplots(1, 2, figsize=(7.6, 2.0), layout="constrained", sharey=True)
    titles = ("relative time to first token, 2048 tokens", "relative cache bytes")
    for axis, values, title in zip(axes, (times, sizes), titles, strict=True):
        drawn = axis.barh(names, values, color=["#9aa4ae", "#4878a8", "#e0913a"])
        axis.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, 1.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    plot(PLOT)


if __name__ == "__main__":
    main()
