"""Figures, drawn straight to PNG files: no window, no pyplot, no state between them."""

import json
from pathlib import Path


def new_figure(columns: int = 1):
    """An empty figure of `columns` axes side by side, of 6 x 4 inches each, and the list of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * 6.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]


def save(figure, path: Path) -> Path:
    """Write a figure as PNG, atomically."""
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(partial, format="png", dpi=120)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def save_result(result: dict, out: Path, name: str) -> dict:
    """Write `result` to `out`/`name`.json atomically, beside its plot."""
    partial = out / f".{name}.json.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / f"{name}.json")
    print(f"saved {out / name}.json and {out / name}.png")
    return result


def slim_errors(errors: dict[str, list[float]], path: Path) -> Path:
    """Relative error of each way of storing a row, by row; see swiftkv_jax/slim."""
    figure, (axes,) = new_figure()
    for name, values in errors.items():
        axes.semilogy(values, marker="o", markersize=4, label=name)
    axes.set(xlabel="row", ylabel="relative error of values (or keys)")
    axes.set_xticks(range(max(map(len, errors.values()), default=0)))
    if errors:
        axes.legend()
    return save(figure, path)


def training(rows: list[dict], path: Path) -> Path:
    """Training loss by step, and held-out figures beside it, from the rows of a metrics.jsonl."""
    steps = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if any(name.startswith("eval/") for name in row)]
    last = evaluated[-1] if evaluated else ()
    figures = [name for name in last if name.rpartition("/")[2] in ("kl", "cross_entropy")]
    figure, axes = new_figure(columns=2 if figures else 1)
    axes[0].plot([row["step"] for row in steps], [row["loss"] for row in steps], linewidth=1)
    axes[0].set(xlabel="step", ylabel="loss", title="training")
    for name in figures:
        points = [(row["step"], row[name]) for row in evaluated if name in row]
        axes[1].plot(*zip(*points, strict=True), marker="o", markersize=4, label=name.removeprefix("eval/"))
    if figures:
        axes[1].set(xlabel="step", ylabel="nats per token", title="held-out data")
        axes[1].legend()
    return save(figure, path)
