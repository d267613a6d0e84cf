"""Plots of the papers' figures, as PNG files; see swiftkv_jax/analysis/plots.py."""

from pathlib import Path

import numpy as np

from swiftkv_jax.analysis.plots import new_figure, save

_STYLE = {"marker": "o", "markersize": 3, "capsize": 2, "linewidth": 1}  # of points with errors


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
    system, with standard errors; and agreement by time to the first token where that was measured (KV
    prediction paper, figure 5a). `points` as in benchmarks/papers/compare."""
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
    if legend:  # beside the axes: it has as many entries as systems, and would lie on some
        axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))


def _curves(points) -> list[list]:
    """The points of each system by their FLOPs."""
    systems = dict.fromkeys(p.system for p in points)
    return [sorted((p for p in points if p.system == name), key=lambda p: p.flops) for name in systems]


def row_errors(errors, path: Path) -> Path:
    """L1 of predicted keys and values by row and position, and the distribution of the differences in some of
    the rows (KV prediction paper, figures 6 and 7); `errors` as in compare/row_errors.py."""
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
