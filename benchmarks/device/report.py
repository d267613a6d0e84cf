"""A run's report: every line beside what the device can do, ratios, goals, and the students' answers."""

from collections.abc import Mapping

from benchmarks.common import normalised_tflops, table
from benchmarks.device.engine import plan_of
from benchmarks.device.order import HALF, STANDARD, STUDENT, TEACHER, calls, calls_of_rows, label
from benchmarks.device.shapes import Shape
from benchmarks.device.student import PROMPTS, STAGES
from benchmarks.device.training import agrees
from demo import smollm2
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.kernels.check.calls import known
from swiftkv_jax.kernels.check.decide import is_right, sizes_of
from swiftkv_jax.kernels.check.supervisor import Measurement
from swiftkv_jax.kernels.common.case import OFF, Call

RATIOS = {"prompt_tokens_per_s": "prefill", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "tokens_per_s": "in all"}
LONGEST = 15  # kernels of a profile in the report
_ENGINE = {
    "prompt_tokens_per_s": "{:,.0f} prompt tokens/s",
    "matmul": "{:.0%} of a matmul",
    "ttft_ms": "TTFT {:.1f} ms",
    "tpot_ms": "TPOT {:.2f} ms",
    "copy": "{:.0%} of a copy",
    "host_ms_per_step": "host {:.2f} ms a step",
    "tokens_per_s": "{:,.0f} tokens/s in all",
    "normalised_tflops": "{:.0f} normalised TFLOPS",
    "compile_seconds": "compiled in {:.0f} s",
}


def share(rate: float, top: Mapping, by: str) -> float | None:
    """A rate as a share of the ceiling "bytes" or "flops", if that was measured."""
    return rate / top[by] if by in top else None


def of_engine(shape: Shape, args: Mapping, found: Mapping, top: Mapping) -> dict:
    """An engine line with shares of the ceilings and normalised TFLOPS.

    The FLOPs of a prompt token are those that the engine runs: of the plan's depth, without the vocabulary.
    """
    found, config, context = dict(found), shape.config, args["prompt"]
    if "prompt_tokens_per_s" in found:
        plan = plan_of(args["plan"], config)
        work = flops_table(config, plan, context, layers=plan.depth)
        rate = found["prompt_tokens_per_s"] * 1e9 * (work["total"] - work["vocab"])
        found["matmul"] = share(rate, top, "flops")
    if "tokens_per_s" in found:
        found["copy"] = share(1e3 * found["bytes_per_step"] / found["tpot_ms"], top, "bytes")
        found["normalised_tflops"] = normalised_tflops(config, found["tokens_per_s"], context)
    return found


def ratios(lines: Mapping[str, dict], asked: Mapping[str, Measurement]) -> dict[str, dict[str, float]]:
    """Each engine line over the line of the standard plan with the same kernels and sizes."""
    out = {}
    for name, line in asked.items():
        if line.task != "engine" or line.args["plan"] == STANDARD:
            continue
        alike = {"plan": STANDARD, "fill": None, "cache_dtype": "auto"}
        wanted = {**line.args, **alike}
        engines = ((n, each.args) for n, each in asked.items() if each.task == "engine")
        base = next((n for n, args in engines if {**args, "fill": None} == wanted), "")
        mine, its = lines.get(name, {}), lines.get(base, {})
        both = {words: mine[key] / its[key] for key, words in RATIOS.items() if key in mine and key in its}
        if both:
            out[name] = both
    return out


def goals(shape: Shape, lines: Mapping[str, dict], asked: Mapping[str, Measurement]) -> dict[str, tuple]:
    """Goal -> (least, reached), or (most, reached) of a time; None if there is no number."""
    top = lines.get("ceilings", {})

    def fastest(call: Call) -> dict[str, dict]:
        """Size -> the fastest of the right candidates there."""
        found: dict[str, dict] = {}
        for name in known(call, shape.candidates[call.kind]):
            if is_right(one := lines.get(f"{label(call)}: {name}", {})):
                for size, value in sizes_of(one).items():
                    found[size] = min(value, found.get(size, value), key=lambda x: x["seconds"])
        return found

    both, alone = map(fastest, calls_of_rows(shape)[:2])
    decoded = [x["bytes"] / x["seconds"] for x in fastest(calls(shape)["decode"]).values()]
    times = [both[size]["seconds"] / alone[size]["seconds"] for size in both if size in alone]
    standard = [
        of_engine(shape, line.args, lines[name], top).get("matmul")
        for name, line in asked.items()
        if line.task == "engine" and line.args["plan"] == STANDARD and name in lines
    ]

    def is_claim(args: Mapping) -> bool:
        """Whether an engine line is SwiftKV alone, rows as wide as the standard's, at the first length."""
        first = (args["requests"], args["prompt"]) == shape.requests[0]
        return first and args["plan"] == HALF and args["cache_dtype"] == "auto"

    half = [r for name, r in ratios(lines, asked).items() if is_claim(asked[name].args)]
    mfu = [found["mfu"] for name, found in lines.items() if name.startswith("step: ") and found.get("mfu")]

    def by_winners(key: str) -> float | None:
        """By the first line's kernels: slow ones would make prompts, and so SwiftKV, count for more."""
        return next((r[key] for r in half if key in r), None)

    return {
        "prefill of the standard plan, share of a matmul": (0.70, max(filter(None, standard), default=None)),
        "paged decode, share of a copy": (0.85, share(max(decoded), top, "bytes") if decoded else None),
        "keys alone, times as fast as keys and values": (1.6, max(times, default=None)),
        f"{HALF}, prompt tokens/s over the standard's": (1.8, by_winners("prefill")),
        f"{HALF}, tokens/s in all over the standard's": (1.45, by_winners("in all")),
        f"{HALF}, TPOT over the standard's": (1.0, by_winners("TPOT")),
        "distillation step, MFU": (0.40, max(mfu, default=None)),
    }


def said(shape: Shape, line: Measurement, lines: Mapping[str, dict]) -> str:
    """A line's result in a few words, as far as it got."""
    found, top = lines.get(line.name, {}), lines.get("ceilings", {})
    task = {"engine": _engine, "examine": _examined, "train": _trained, "student": _student}.get(line.task)
    words = task(shape, line, lines, top) if task else _plain(found)
    if found.get("status") == "done":
        return words
    state = f"{found.get('status', 'not reached')}: {found.get('reason', 'the run ended here')}"
    return f"{state}; {words}" if words else state


def _engine(shape: Shape, line: Measurement, lines: Mapping[str, dict], top: Mapping) -> str:
    found = of_engine(shape, line.args, lines.get(line.name, {}), top)
    return ", ".join(form.format(found[k]) for k, form in _ENGINE.items() if found.get(k) is not None)


def _examined(shape: Shape, line: Measurement, lines: Mapping[str, dict], top: Mapping) -> str:
    found = lines.get(line.name, {})
    if not found.get("right", True):
        return f"NOT RIGHT: {found['why']}"
    by = "flops" if line.args["call"]["kind"] in ("chunk", "fill") else "bytes"
    parts = [f"right, error {found['error']:.1e}"] if "error" in found else []
    for size, value in sizes_of(found).items():
        part = share(value[by] / value["seconds"], top, by) if value.get(by) else None
        of = "" if part is None else f", {part:.0%} of a {'matmul' if by == 'flops' else 'copy'}"
        alone = line.args["name"] == line.args["beside"]
        times = "" if alone else f" ({value['beside'] / value['seconds']:.2f}x)"
        off = f", OFF BY {value['off']:.2g}" if value["off"] > OFF else ""
        parts.append(f"{size}: {1e3 * value['seconds']:.3f} ms{times}{of}{off}")
    return "; ".join(parts)


def _trained(shape: Shape, line: Measurement, lines: Mapping[str, dict], top: Mapping) -> str:
    found = lines.get(line.name, {})
    safe = line.name.replace(line.args["attention"], shape.candidates["train"][0])
    safe = safe.removesuffix(", recomputed")
    right = {None: "", True: "right, ", False: "NOT RIGHT, "}[agrees(found, lines.get(safe, {}))]
    if "step_ms" not in found:
        return right
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu']:.0%}"
    return (
        f"{right}{found['step_ms']:.1f} ms a step, {found['tokens_per_s']:,.0f} tokens/s{mfu}, "
        f"{found['temporary_gib']:.1f} GiB beside the arguments"
    )


def _student(shape: Shape, line: Measurement, lines: Mapping[str, dict], top: Mapping) -> str:
    found, parts = lines.get(line.name, {}), []
    for key in (key for stage in STAGES for key in (stage, f"{stage}_long") if key in found):
        length = smollm2.LONG if key.endswith("_long") else smollm2.CONTEXT
        stage = key.removesuffix("_long").replace("_", " ")
        parts.append(f"{stage} at {length}: {smollm2.figures(found[key])}")
    if "steps" in found:
        parts.append(f"{found['steps']} steps, {found['trained_tokens_per_s']:,.0f} tokens/s")
    return "; ".join(parts)


def _plain(found: Mapping) -> str:
    left_out = ("status", "seconds", "reason", "details", "line", "device", "versions", "date", "answers")
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in found.items() if k not in left_out}
    return ", ".join(f"{k} {v}" for k, v in shown.items())


def markdown(
    shape: Shape,
    head: Mapping,
    asked: Mapping[str, Measurement],
    lines: Mapping[str, dict],
    before: Mapping[str, dict | None],
) -> str:
    """All lines, the goals and the answers, as Markdown; of lines that were not reached, what was measured
    `before`."""
    where = lines.get("hardware", {})
    versions = ", ".join(f"{name} {version}" for name, version in where.get("versions", {}).items())
    rows = []
    for name, line in asked.items():
        took = f"{lines.get(name, {}).get('seconds', 0):.0f}"
        words = said(shape, line, lines).replace("|", "/").replace("\n", " ")
        rows.append([name, words, took, f"{line.least:.0f}", f"{line.limit:.0f}"])
    missed = {n: e for n, e in before.items() if e and lines.get(n, {}).get("status") != "done"}
    older = [[n, said(shape, asked[n], {**lines, n: e}), e["date"]] for n, e in missed.items()]
    aims = goals(shape, lines, asked).items()
    reached = [[g, f"{a:g}", "not measured" if got is None else f"{got:.3g}"] for g, (a, got) in aims]
    over = [
        [name.removeprefix("engine: "), *(f"{r[w]:.2f}" if w in r else "-" for w in RATIOS.values())]
        for name, r in ratios(lines, asked).items()
    ]
    parts = [
        f"# Measured on {where.get('device', 'an unknown device')}",
        f"`{head['command']}`, {head['date']}, driver {where.get('driver') or 'unknown'}; {versions}.",
        "Engine, training and transformers: random weights. A kernel is right if its numbers are the "
        "reference's in float32, twice the same; in brackets, how many times as fast as the first right one.",
        table(["goal", "aim", "reached"], reached),
        "Over the standard plan, with the same kernels and sizes:",
        table(["engine", *RATIOS.values()], over),
        table(["line", "found", "s", "expected", "limit"], rows),
    ]
    if older:
        parts += ["Measured before, by other sources or versions:", table(["line", "found", "date"], older)]
    return "\n\n".join([*parts, *_profiles(lines), *_answers(lines)]) + "\n"


def _profiles(lines: Mapping[str, dict]) -> list[str]:
    """The longest kernels of every engine, as far as they were recorded."""
    parts = []
    for name, found in lines.items():
        for part in ("prompt", "decode"):
            if (seen := found.get(f"{part}_profile")) and seen["kernels"]:
                head = f"## {name.removeprefix('engine: ')}: {part}"
                busy = f"Kernels ran for {seen['busy_ms']:.1f} of {seen['span_ms']:.1f} ms."
                busy += " Of a loop that is one graph the profiler sees little." * (part == "decode")
                rows = [
                    [kernel.replace("|", "/"), str(count), f"{ms:.2f}", f"{ms / seen['busy_ms']:.1%}"]
                    for kernel, count, ms in seen["kernels"][:LONGEST]
                ]
                parts += [head, busy, table(["kernel", "launches", "ms", "share"], rows)]
    return parts


def _answers(lines: Mapping[str, dict]) -> list[str]:
    """Both models' answers, as far as there are any."""
    names = {"teacher": TEACHER, "student": STUDENT}
    given = {who: lines.get(name, {}).get("answers") for who, name in names.items()}
    given = {"": PROMPTS.read_text().splitlines()} | {who: texts for who, texts in given.items() if texts}
    rows = zip(*given.values(), strict=True)
    cells = [[" ".join(text.split()).replace("|", "/")[:300] for text in row] for row in rows]
    return ["## Answers", table(list(given), cells)] if len(given) > 1 else []
