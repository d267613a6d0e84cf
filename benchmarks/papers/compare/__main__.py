"""The command, and the report that it writes."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.papers import command, plots
from benchmarks.papers.compare import evaluation, systems, times
from benchmarks.papers.compare.evaluation import Answers, Point, answers_by_rows, point
from benchmarks.papers.compare.row_errors import row_errors
from benchmarks.papers.compare.systems import Source, System, is_half, total
from benchmarks.papers.compare.training import trained
from benchmarks.papers.prediction_flops import Sizes
from swiftkv_jax.analysis.plots import save_result
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.kernels.common import dispatch


def parser() -> Parser:
    """All flags of the command."""
    about = (
        "Compare SwiftKV, KV prediction and others: quality of the first token against FLOPs of the prompt."
    )
    p = Parser(prog="python -m benchmarks.papers.compare", description=about)
    add = p.add_argument
    add("--model", required=True, metavar="DIR", help="a standard model: folder, GGUF file or hub id")
    text = "documents in any format that train.py reads (default: Python's documentation, in the package)"
    add("--text", default=str(DEMO / "corpus.jsonl.xz"), metavar="FILE", help=text)
    add("--prompts", type=int, default=1024, metavar="N", help="least number of held-out prompts (1024)")
    add("--few", action="store_true", help="one setting per system: takes a few minutes")
    add("--length", type=int, default=256, metavar="N", help="tokens per row of text (256)")
    add("--auxiliary", metavar="DIR", help="a smaller model with the same tokenizer, for KV prediction")
    add("--train", type=int, default=0, metavar="STEPS", help="also train each system for so many steps (0)")
    add("--rounds", type=int, default=5, metavar="N", help="timing rounds; 0 measures no times (5)")
    out = Path("runs/compare")
    add("--out", type=Path, default=out, metavar="DIR", help="output folder (runs/compare)")
    return p


def measured(source: Source, own: Answers, args: argparse.Namespace) -> Iterator[tuple[System | None, Point]]:
    """Every system with its point, in the order of the table; None as the system of a baseline."""
    for kind in systems.SYSTEMS:
        for system in kind(source):
            yield system, _of_system(source, own, args, system)
            again = [system] if args.train else []
            if again and is_half(source, system) and isinstance(system.model, Predicted):
                again += systems.by_weights(system)
            for each in again:
                to = args.out / "trained"
                made = trained(each, args.model, args.text, args.length, args.train, to)
                yield made, _of_system(source, own, args, made)
    sizes = Sizes.of(source.model.config)
    full = total(source.prompts, lambda n: systems.full_depth(sizes, n))
    for name, setting, baseline in systems.others(source):
        found, flops = evaluation.answers_by_prompts(source.model, source.params, baseline, source.prompts)
        yield None, point(name, setting, flops / full, found, own)


def _of_system(source: Source, own: Answers, args: argparse.Namespace, system: System) -> Point:
    found = answers_by_rows(system.model, system.params, source.prompts)
    result = point(system.name, system.setting, system.flops, found, own)
    full, most = (source.model, source.params), source.model.config.longest_context
    if not args.rounds:
        return result
    one = system.model, system.params
    shapes = {"ttft": (1, args.length), "ttft_short": times.SHORT}
    shapes = {name: shape for name, shape in shapes.items() if shape[1] <= most}
    ratios = {name: times.over_full_depth(full, one, *shape, args.rounds) for name, shape in shapes.items()}
    return result._replace(**ratios)


def report(args: argparse.Namespace) -> dict:
    """Measure every system, write the table, the plots and compare.json, and return the content of the
    latter.

    Raises:
      UsageError: no standard model, a window below the length, too few layers, an auxiliary that does not
        fit, or a text that is too short.
    """
    for name, least in (("prompts", 1), ("train", 0), ("rounds", 0)):
        integer(f"--{name}", getattr(args, name), least)
    folder, length, out = local_folder(args.model), args.length, args.out
    with working(show, f"reading {args.model}"):
        model, params = from_pretrained(folder, dtype="float32")
    integer("--length", length, 4, model.config.longest_context)
    layers = model.config.num_layers
    if model.plan != KVPlan.standard(layers) or layers < 4 or min(model.config.windows) < length:
        raise UsageError("compare takes a standard model of 4 layers or more, no window of it below --length")
    auxiliary = local_folder(args.auxiliary) if args.auxiliary else None
    if auxiliary is not None:
        systems.check_auxiliary(folder, auxiliary, length)
    with working(show, f"reading {args.text}"):
        prompts = evaluation.prompts_of(args.text, folder, args.prompts, length)
        batches = evaluation.fit_batches(args.text, folder, length)
        source = Source(model, params, folder, batches, prompts, args.few, auxiliary)
    out.mkdir(parents=True, exist_ok=True)
    with working(show, "computing the model's own answers"):
        own, points, halves = answers_by_rows(model, params, prompts), [], []
    show(f"{prompts.lengths.size} prompts of {len(prompts.tokens)} rows; the model's: {own.nats.mean():.4f}")
    with working(show, "asking the systems") as doing:
        for system, found in doing.counted(measured(source, own, args)):
            show(f"{found.system}, {found.setting}: FLOPs {found.flops:.3f}, gap {found.gap:.4f}")
            points.append(found)
            if system is not None and is_half(source, system):
                halves.append(system)
    print(evaluation.table(points))
    (out / "compare.md").write_text(evaluation.table(points) + "\n", encoding="utf-8")
    plots.comparison(points, out / "compare.png")
    rows = [{k: round(v, 6) if isinstance(v, float) else v for k, v in p._asdict().items()} for p in points]
    result = {"model": args.model, "kernels": dispatch.unnamed(), "text": args.text}
    result |= {"prompts": int(prompts.lengths.size), "rows": len(prompts.tokens), "length": length}
    result |= {"fit_tokens": evaluation.FIT_TOKENS, "train_tokens": args.train * evaluation.ROWS * length}
    result |= {"teacher_nats": round(float(own.nats.mean()), 6), "points": rows}
    with working(show, "measuring rows and times for the plots"):
        drawn = pictures(source, halves, args.rounds, out)
    return save_result(result | drawn, out, "compare")


def pictures(source: Source, halves: list[System], rounds: int, out: Path) -> dict:
    """The KV prediction paper's own figures: row_errors.png (6 and 7), and ttft.png (5b) for the model, its
    half, and KV prediction with that half. Returns the numbers of both."""
    found: dict = {}
    for name, setting, _, model, params, _ in halves:
        if isinstance(model, Predicted):
            errors = row_errors(model, params, source.prompts.tokens)
            plots.row_errors(errors, out / "row_errors.png")
            keys, values = ([round(float(x), 5) for x in l1.mean(1)] for l1 in errors.l1)
            found["row_l1"] = {"of": f"{name}, {setting}", "keys": keys, "values": values}
    if rounds:
        by_name = {s.name: (s.model, s.params) for s in halves}
        curves = times.by_length((source.model, source.params), by_name, rounds)
        plots.times(curves, out / "ttft.png")
        found["ttft_seconds"] = {"prompts": times.MANY} | curves
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    return command.run(parser(), argv, report)


if __name__ == "__main__":
    sys.exit(main())
