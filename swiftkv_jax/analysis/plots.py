"""Figures, drawn straight to PNG files: no window, no pyplot, no state between them."""

from pathlib import Path

import numpy as np


def new_figure(columns: int = 1):
    """An empty figure of `columns` axes side by side, of 6 x 4 inches each, and the list of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * 6.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]


def save(figure, path: Path) -> Path:
    """Write a figure as PNG; a plot that could not be written whole leaves nothing behind."""
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
    """Relative error of what each way of storing a row gives back, by row; see swiftkv_jax/slim."""
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


def comparison(points, path: Path) -> Path:
    """Cross-entropy above the model's, and agreement with it, by FLOPs of the prompt: a curve for each
    system, with standard errors; `points` as in swiftkv_jax/compare.py."""
    figure, (left, right) = new_figure(columns=2)
    for system in dict.fromkeys(p.system for p in points):
        curve = sorted((p for p in points if p.system == system), key=lambda p: p.flops)
        flops, style = (
            [p.flops for p in curve],
            {"marker": "o", "markersize": 3, "capsize": 2, "linewidth": 1},
        )
        left.errorbar(flops, [p.gap for p in curve], [p.gap_error for p in curve], label=system, **style)
        right.errorbar(flops, [p.agreement for p in curve], [p.agreement_error for p in curve], **style)
    left.set(xlabel="FLOPs of the prompt, over full depth", ylabel="first token: nats above the model's")
    left.set_yscale("symlog", linthresh=0.01)
    left.legend(fontsize="x-small")
    right.set(xlabel="FLOPs of the prompt, over full depth", ylabel="first token: the model's likeliest one")
    return save(figure, path)
