"""The winners, the goals met, and the table."""

from collections.abc import Sequence

from benchmarks.common import table
from benchmarks.first_light.candidates import KINDS, Candidate
from swiftkv_jax.kernels.check.cases import OFF
from swiftkv_jax.kernels.check.decide import AHEAD, ahead, sizes_of

CEILING = {"decode": "bytes", "fp8 decode": "bytes", "keys": "bytes", "chunk": "flops", "fill": "flops"}


def line_of(task: str, candidate: Candidate) -> str:
    """The name of a candidate's line."""
    return f"{task}: {candidate.kind}, {candidate.name}"


def is_right(lines: dict, candidate: Candidate) -> bool:
    """Whether a candidate's numbers were checked and right."""
    return lines.get(line_of("numerics", candidate), {}).get("right") is True


def ratio(lines: dict, candidate: Candidate, safe: Candidate) -> float | None:
    """A candidate's time over the safe one's, as the geometric mean over all sizes. None if it must not be
    chosen: it is not right, was not timed at every size, or is not ahead at each."""
    mine, its = (lines.get(line_of("contest", c), {}) for c in (candidate, safe))
    if not is_right(lines, candidate) or mine.get("status") != "done" or its.get("status") != "done":
        return None
    mine, its = sizes_of(mine), sizes_of(its)
    if not its or mine.keys() != its.keys() or any((m.get("off") or 0) > OFF for m in mine.values()):
        return None
    return ahead((mine[name]["seconds"], its[name]["seconds"]) for name in its)


def winner(lines: dict, candidates: Sequence[Candidate], kind: str, page: int | None = None) -> Candidate:
    """The fastest of a kind that is ahead of the safe one; else the safe one, for pages of `page`."""
    safe, *others = (c for c in candidates if c.kind == kind)
    ahead = {c: r for c in others if page in (None, c.page) and (r := ratio(lines, c, safe)) is not None}
    if ahead:
        return min(ahead, key=lambda c: ahead[c])
    return safe if page in (None, safe.page) else Candidate(**(vars(safe) | {"page": page}))


def best_seconds(lines: dict, candidates: Sequence[Candidate], kind: str, name: str) -> float | None:
    """The least seconds of the right candidates of a kind at a size."""
    found = [
        value["seconds"] if isinstance(value, dict) else value
        for c in candidates
        if c.kind == kind and is_right(lines, c)
        if (value := lines.get(line_of("contest", c), {}).get(name)) is not None
    ]
    return min(found, default=None)


def goals(
    lines: dict, candidates: Sequence[Candidate], layers: Sequence[int], decode: str, keys: str
) -> dict:
    """The goals and the values reached, for the deepest model measured; None if there is no number."""
    top = lines.get("ceilings", {})
    rates = [
        value["bytes"] / value["seconds"]
        for c in candidates
        if c.kind == "decode" and is_right(lines, c)
        if isinstance(value := lines.get(line_of("contest", c), {}).get(decode), dict)
    ]
    share = max(rates) / top["bytes"] if rates and "bytes" in top else None
    one, two = (best_seconds(lines, candidates, "keys", name) for name in (keys, "keys and values"))
    prefill = gain = None
    for count in layers:
        standard, half = (lines.get(f"engine: {count} layers, {p}", {}) for p in ("standard", "SwiftKV 50 %"))
        prefill = standard.get("matmul_share") or prefill
        if "tokens_per_s" in standard and "tokens_per_s" in half:
            gain = half["tokens_per_s"] / standard["tokens_per_s"]
    return {
        "prefill of the standard plan, of the matmul ceiling": (0.60, prefill),
        f"paged decode, {decode}, of the copy ceiling": (0.80, share),
        "K-cache attention, times as fast as K and V": (1.6, two / one if one and two else None),
        "SwiftKV 50 %, times the standard's tokens/s": (1.45, gain),
    }


def said(task: str, top: dict, kind: str = ""):
    """Return a function that formats a result of a task for the screen."""

    def numerics(found: dict) -> str:
        how = f"error {found['error']:.1e}" if found["error"] is not None else "no number"
        return f"right, {how}" if found["right"] else f"WRONG: {found['why']}"

    def contest(found: dict) -> str:
        parts = [f"{name}: {_timed(value, top, kind)}" for name, value in sizes_of(found).items()]
        if "keys and values" in found:
            parts.append(f"keys and values {1e3 * found['keys and values']:.3f} ms")
        return "; ".join(parts)

    def engine(found: dict) -> str:
        forms = {
            "prompt_tokens_per_s": "{:,.0f} prompt tokens/s",
            "matmul_share": "{:.1%} of matmul",
            "ttft_ms": "TTFT {:.1f} ms",
            "tpot_ms": "TPOT {:.2f} ms",
            "copy_share": "{:.1%} of copy",
            "host_ms_per_step": "host {:.2f} ms per step",
            "tokens_per_s": "{:,.0f} tokens/s in all",
        }
        return ", ".join(form.format(found[k]) for k, form in forms.items() if found.get(k) is not None)

    def plain(found: dict) -> str:
        return ", ".join(f"{k} {_short(v)}" for k, v in found.items() if k not in ("status", "seconds"))

    return {"numerics": numerics, "contest": contest, "peer": contest, "engine": engine}.get(task, plain)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _timed(value: dict, top: dict, kind: str) -> str:
    seconds, by = value["seconds"], CEILING[kind]
    rate = value[by] / seconds
    words = f"{rate / 1e9:.0f} GB/s" if by == "bytes" else f"{rate / 1e12:.2f} TFLOP/s"
    share = f", {rate / top[by]:.1%} of the ceiling" if by in top else ""
    off = f", OFF BY {value['off']:.2g}" if (value.get("off") or 0) > OFF else ""
    return f"{1e3 * seconds:.3f} ms, {words}{share}{off}"


def markdown(result: dict) -> str:
    """All lines, the winners and the goals, as Markdown."""
    lines, top = result["lines"], result["lines"].get("ceilings", {})
    where = lines.get("hardware", {})
    versions = ", ".join(f"{name} {version}" for name, version in where.get("versions", {}).items())
    rows = []
    for name, found in lines.items():
        task, _, rest = name.partition(": ")
        kind = rest.partition(",")[0]
        words = said(task, top, kind)(found) if found["status"] == "done" else _unfinished(found, top, kind)
        rows.append([name, words.replace("|", "/"), f"{found.get('seconds', 0):.1f}"])
    parts = [
        f"# First light on {where.get('device', 'an unknown device')}",
        f"`{result['command']}`, {result['date']}, driver {where.get('driver') or 'unknown'}; {versions}.",
        table(["line", "found", "s"], rows),
        f"Winners: correct, and at most {AHEAD:.0%} of the safe implementation's time at every timed size.",
        table(["kind of call", "winner"], [[kind, name] for kind, name in result["winners"].items()]),
        table(
            ["goal", "at least", "found"],
            [
                [name, f"{least:g}", "not measured" if got is None else f"{got:.3g}"]
                for name, (least, got) in result["goals"].items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _unfinished(found: dict, top: dict, kind: str) -> str:
    sizes = [f"{name}: {_timed(value, top, kind)}" for name, value in sizes_of(found).items()]
    parts = [f"{k} {_short(v)}" for k, v in found.items() if isinstance(v, float) and k != "seconds"]
    return "; ".join([f"{found['status']}: {found.get('reason', 'the run ended here')}", *sizes, *parts])


def winners(lines: dict, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Kind of call -> the winner's name."""
    return {k: winner(lines, candidates, k).name for k in KINDS if any(c.kind == k for c in candidates)}
