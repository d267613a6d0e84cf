"""Figures, drawn straight to PNG files: no window, no pyplot, no state between them."""

from pathlib import Path

import numpy as np

_STYLE = {"marker": "o", "markersize": 3, "capsize": 2, "linewidth": 1}  # of points with errors


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


def layer_similarity(
    scores: np.ndarray, matrix: np.ndarray, threshold: float, split: int, path: Path
) -> Path:
    """SimScore by layer (SwiftKV paper, figure 2) beside the matrix it averages; see similarity.py."""
    figure, (left, right) = new_figure(columns=2)
    left.plot(scores, marker="o", markersize=3)
    left.axhline(threshold, color="gray", linestyle=":", label=f"threshold {threshold}")
    left.axvline(split, color="tab:orange", linestyle="--", label=f"suggested split {split}")
    left.set(xlabel="layer", ylabel="mean cosine with all later layers' inputs", title="SimScore")
    left.legend()
    image = right.imshow(matrix, origin="lower", vmin=min(0.0, float(matrix.min())), vmax=1.0)
    right.set(xlabel="input of layer", ylabel="input of layer", title="cosine similarity")
    figure.colorbar(image, ax=right)
    return save(figure, path)


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


def early_exit(share: np.ndarray, agreement: np.ndarray, threshold: float, path: Path) -> Path:
    """Shares of places (bars) and agreement (line) by bin of the exit head's largest probability (SwiftKV
    paper, figure B.1); see early_exit.py."""
    figure, (left,) = new_figure()
    width = 1 / len(share)
    middle = (np.arange(len(share)) + 0.5) * width
    left.bar(middle, share, width=0.9 * width, color="tab:blue", alpha=0.5)
    left.axvline(threshold, color="gray", linestyle=":")
    left.set(xlabel="largest probability of the exit head", ylabel="share of places", xlim=(0, 1))
    right = left.twinx()
    right.plot(middle, agreement, color="tab:orange", marker="o", markersize=3)
    right.set(ylabel="agreement with the whole model", ylim=(0, 1))
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


def comparison(points, path: Path) -> Path:
    """Cross-entropy above the model's, and agreement with it, by FLOPs of the prompt: a curve for each
    system, with standard errors; and agreement by time to the first token where that was measured (KV
    prediction paper, figure 5a). `points` as in swiftkv_jax/compare."""
    timed = [p for p in points if p.ttft_short is not None]
    figure, (left, right, *last) = new_figure(columns=3 if timed else 2)
    gaps(left, points, legend=False)
    figure.legend(*left.get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=5)
    for curve in _curves(points):
        means, errors = [p.agreement for p in curve], [p.agreement_error for p in curve]
        right.errorbar([p.flops for p in curve], means, errors, **_STYLE)
        for axis in last:
            known = sorted((p for p in curve if p.ttft_short is not None), key=lambda p: p.ttft_short)
            axis.plot([p.ttft_short for p in known], [p.agreement for p in known], marker="o", markersize=3)
            axis.set(xlabel="TTFT of short prompts, over full depth", ylabel="agreement")
    right.set(xlabel="FLOPs of the prompt, over full depth", ylabel="agreement of the first token")
    return save(figure, path)


def gaps(axis, points, legend: bool = True) -> None:
    """Cross-entropy above the model's by FLOPs of the prompt, a curve for each system."""
    for curve in _curves(points):
        means, errors = [p.gap for p in curve], [p.gap_error for p in curve]
        axis.errorbar([p.flops for p in curve], means, errors, label=curve[0].system, **_STYLE)
    axis.set(xlabel="FLOPs of the prompt, over full depth", ylabel="first token: nats above the model's")
    axis.set_yscale("symlog", linthresh=0.01)
    if legend:
        axis.legend(fontsize="x-small")


def _curves(points) -> list[list]:
    """The points of each system by their FLOPs."""
    systems = dict.fromkeys(p.system for p in points)
    return [sorted((p for p in points if p.system == name), key=lambda p: p.flops) for name in systems]


def row_errors(errors, path: Path) -> Path:
    """L1 of predicted keys and values by row and position, and the distribution of the differences in some of
    the rows (KV prediction paper, figures 6 and 7); `errors` as in swiftkv_jax/compare/row_errors.py."""
    figure, axes = new_figure(columns=4)
    rows = errors.l1.shape[1]
    shown = sorted({round(i * (rows - 1) / 6) for i in range(7)})
    for axis, name, l1 in zip(axes[:2], ("keys", "values"), errors.l1, strict=True):
        image = axis.imshow(l1, origin="lower", aspect="auto", interpolation="nearest")
        axis.set(xlabel="place in the text", ylabel="row of the base", title=f"L1 of predicted {name}")
        figure.colorbar(image, ax=axis)
    parts = zip(axes[2:], ("keys", "values"), errors.edges, errors.counts, strict=True)
    for axis, name, edges, counts in parts:
        for row in shown:
            density = counts[row] / max(1, counts[row].sum()) / np.diff(edges)
            axis.semilogy((edges[1:] + edges[:-1]) / 2, density, label=f"row {row}", linewidth=1)
        axis.set(xlabel=f"predicted {name} minus own", ylabel="density")
        axis.legend(fontsize="x-small")
    return save(figure, path)


def times(curves: dict[str, dict[int, float]], path: Path) -> Path:
    """Time to the first token by prompt length (KV prediction paper, figure 5b).

    curves: name -> length -> seconds.
    """
    figure, (axis,) = new_figure()
    for name, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=name)
    axis.set(xlabel="tokens of a prompt", ylabel="seconds to the first tokens")
    axis.legend()
    return save(figure, path)
