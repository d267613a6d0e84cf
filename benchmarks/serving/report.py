"""The report of the runs: medians over the rounds, relative to the first system, as Markdown and as plots."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import SYSTEMS, bars, table
from swiftkv_jax.analysis.plots import new_figure, save

_MEDIANS = ("request_throughput", "total_token_throughput", "output_throughput", "median_e2el_ms")
_TITLES = {
    "fixed": "Fixed lengths, tokens in:out",
    "sharegpt": "ShareGPT's lengths, by the least ratio of tokens in to tokens out",
    "rates": "Arrival rates, requests per second",
    "budgets": "Cache budgets, as shares of what a full batch of the standard model needs",
}


def aggregate(runs: Sequence[dict], percentile: float, base: str) -> dict[str, dict[str, dict[str, dict]]]:
    """Workload -> point -> system -> its row. Gains are over the system `base`, in the same round."""
    out: dict[str, dict[str, dict[str, dict]]] = {}
    for run in runs:
        points = out.setdefault(run["workload"], {})
        points.setdefault(run["point"], {}).setdefault(run["system"], {}).setdefault("runs", []).append(run)
    for points in out.values():
        for systems in points.values():
            bases = {run["round"]: run for run in systems.get(base, {"runs": ()})["runs"]}
            for row in systems.values():
                row |= _row(row.pop("runs"), bases, percentile)
    return out


def _row(runs: list[dict], bases: dict[int, dict], percentile: float) -> dict:
    def median(name: str) -> float:
        return statistics.median(run[name] for run in runs)

    row = {name: median(name) for name in _MEDIANS}
    for name in ("ttft", "tpot", "itl"):
        row[f"median_{name}_ms"] = median(f"median_{name}_ms")
        row[f"tail_{name}_ms"] = median(f"p{percentile:g}_{name}_ms")
    goods = [run["request_goodput"] for run in runs]
    row["request_goodput"] = None if None in goods else statistics.median(goods)
    pairs = [(run, bases[run["round"]]) for run in runs if run["round"] in bases]
    speed = "total_token_throughput"
    gains = sorted(run[speed] / other[speed] for run, other in pairs if other[speed])
    row["gains"] = gains
    row["gain"] = statistics.median(gains) if gains else None
    worked = [run["normalised_tflops"] for run in runs if "normalised_tflops" in run]
    row["normalised_tflops"] = statistics.median(worked) if worked else None
    row["failed"] = sum(run["failed"] for run in runs)
    row["requests"] = sum(run["num_prompts"] for run in runs)
    compiled = [run["compilations"] for run in runs]
    row["compilations"] = None if None in compiled else sum(compiled)
    return row


def markdown(settings: dict, found: dict) -> str:
    """The report as Markdown."""
    machine, tail = settings["machine"], f"p{settings['percentile']:g}"
    where = "{device}, jax {jax}, {date}".format(**machine) if machine else "servers that ran already"
    lines = [f"`{settings['command']}`: {where}\n"]
    lines.append(
        f"Medians over the rounds; latencies in ms, of completed requests only, as median / {tail}. Gain: "
        f"tokens per second, in and out, over {settings['systems'][0]}, the median of the rounds' own ratios "
        "(least to most). TFLOPS: normalised, what the standard model needs for as many tokens per second. "
        "Compiled: programs compiled while measuring; a figure with any is no measurement.\n"
    )
    head = "system req/s tokens/s gain TFLOPS TTFT TPOT ITL E2EL good/s failed compiled".split()

    def cells(name: str, row: dict) -> list[str]:
        gain, gains, good, compiled = (row[k] for k in ("gain", "gains", "request_goodput", "compilations"))
        latencies = (
            f"{row[f'median_{m}_ms']:.1f} / {row[f'tail_{m}_ms']:.1f}" for m in ("ttft", "tpot", "itl")
        )
        speed = "" if gain is None else f"{gain:.2f} ({gains[0]:.2f} to {gains[-1]:.2f})"
        work = "" if row["normalised_tflops"] is None else f"{row['normalised_tflops']:.3g}"
        rates = f"{row['request_throughput']:.2f}", f"{row['total_token_throughput']:,.0f}"
        rest = "" if good is None else f"{good:.2f}", f"{row['failed']} of {row['requests']}"
        last = "?" if compiled is None else f"{compiled:g}"
        return [name, *rates, speed, work, *latencies, f"{row['median_e2el_ms']:.1f}", *rest, last]

    for workload, points in found.items():
        lines.append(f"## {_TITLES[workload]}\n")
        for point, systems in points.items():
            rows = [cells(name, row) for name, row in systems.items()]
            rows += [[name, "too small", *[""] * 10] for name in settings["left_out"].get(point, [])]
            lines += [f"{point}\n", table(head, rows) + "\n"]
    nobody = [point for point in settings["left_out"] if point not in found.get("budgets", {})]
    lines += [f"{point}: too small for every system\n" for point in nobody]
    return "\n".join(lines)


def plots(found: dict, folder: Path) -> list[Path]:
    """Write one plot for every workload."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for workload, points in found.items():
        path = folder / f"serving_{workload}.png"
        if workload == "rates":
            _lines(points, path)
        else:
            name = "total_token_throughput" if workload == "budgets" else "gain"
            values = {p: {s: row[name] or 0.0 for s, row in rows.items()} for p, rows in points.items()}
            word = "tokens per second" + ("" if workload == "budgets" else ", over the first system")
            bars(values, (_TITLES[workload], word), path, _colours(points))
        out.append(path)
    return out


def _colours(points: dict) -> dict[str, str]:
    """System -> its colour, the same in every plot."""
    names = list(dict.fromkeys([*SYSTEMS, *(name for systems in points.values() for name in systems)]))
    return {name: f"C{number % 10}" for number, name in enumerate(names)}


def _lines(points: dict, path: Path) -> None:
    """Plot latency over the request rate; nothing is drawn if all requests arrive at once."""
    figure, axes = new_figure(columns=2)
    rates, colours = [point for point in points if point != "inf"], _colours(points)
    for name in dict.fromkeys(system for point in rates for system in points[point]):
        have = [point for point in rates if name in points[point]]
        for axis, metric in zip(axes, ("median_ttft_ms", "median_tpot_ms"), strict=True):
            values = [points[point][name][metric] for point in have]
            rate, colour = [float(point) for point in have], colours[name]
            axis.plot(rate, values, marker="o", label=name, color=colour)
    for axis, word in zip(axes, ("median TTFT, ms", "median TPOT, ms"), strict=True):
        axis.set(xlabel="requests per second", ylabel=word, ylim=(0, 1.05 * axis.get_ylim()[1]))
    axes[0].legend(fontsize=8)
    save(figure, path)
