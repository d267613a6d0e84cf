"""Convert a multi-head checkpoint to Slim attention (arXiv 2503.05840), by measurement.

    swiftkv slim DIR --out DIR [--text FILE | --audio PATH ...]
        [--forms auto|k|v|x] [--cache-dtype D] [--max-kl X]

One half of the text's documents calibrates, the other half measures (docs/slim.md). OUT gets the checkpoint,
slim.json with every candidate of every row and why it was taken or not, and slim.png.
"""

import argparse
import dataclasses
import math
from pathlib import Path

from swiftkv_jax.analysis import plots
from swiftkv_jax.analysis.flops import cache_bytes_per_token
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder, save_pretrained
from swiftkv_jax.common.checks import above
from swiftkv_jax.common.errors import Parser, UsageError, exit_code
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.model import DTYPES
from swiftkv_jax.config.plan import CHECKPOINT_FORMS, ENCODER, SELF, KVPlan
from swiftkv_jax.core.cache import EIGHT_BIT
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.slim import choose, sources, texts
from swiftkv_jax.slim.calibrate import Candidate, RowCandidates, candidates, converted, served
from swiftkv_jax.slim.choose import Choice
from swiftkv_jax.slim.measure import Reference, hybrids

AUTO, MAX_KL = "auto", 1e-3
_SLIM = tuple(form for form in CHECKPOINT_FORMS if form != "kv")
_SPACES = {SELF: "own", ENCODER: "cross"}  # names of the spaces in ways to store all rows of one


def parser() -> Parser:
    p = Parser(description="Convert a multi-head model to store keys alone where the measured loss is small.")
    p.flag("--model DIR", "a checkpoint: folder, or hub id", required=True)
    p.flag("--out DIR", "folder for the converted model", required=True, type=Path)
    p.flag("--text FILE", ".jsonl or .txt like the prompts it will serve (the demo's corpus)")
    p.flag("--audio PATH", "for Whisper: wav files, or folders of them", nargs="+", default=())
    p.flag("--forms", "auto, or one form for every row (auto)", choices=(AUTO, *_SLIM), default=AUTO)
    p.flag("--cache-dtype", "of the cache when served (the model's)", choices=(*DTYPES, *EIGHT_BIT))
    p.flag("--max-kl X", f"bound on the KL, nats per token ({MAX_KL:g})", type=float)
    return p


def convert(args: argparse.Namespace) -> dict:
    """Measure, choose, print, and write the folder; returns the content of slim.json."""
    bound = above("--max-kl", MAX_KL if args.max_kl is None else args.max_kl, 0)
    folder = local_folder(args.model)
    if args.out.resolve() == folder.resolve():
        raise UsageError(f"--out {args.out} is the model itself: name another folder")
    with working(show, f"reading {args.model}"):
        model, params = from_pretrained(folder)
    if {*model.plan.forms, *model.plan.cross_forms} != {"kv"}:
        raise UsageError(f"{args.model} is converted already: give the plain model it was made of")
    config, plan = model.config, model.plan
    dtype = args.cache_dtype or model.dtype
    plain = Transformer(config, plan, "float32")
    wanted = _SLIM if args.forms == AUTO else [args.forms]
    refused = {form: why for form in wanted if (why := FORMS[form].refuses(config))}
    if args.forms in refused:
        raise UsageError(f"rows cannot be stored as {args.forms!r}: {refused[args.forms]}; use --forms auto")
    forms = [form for form in wanted if form not in refused]
    text = ", ".join(args.audio) or args.text or texts.DEFAULT.name
    if plan.cross:
        with working(show, f"generating the model's answers to {text}") as doing:
            fit, kept = sources.read(args.text, args.audio, folder, plain, params, doing)
    elif args.audio:
        raise UsageError(f"--audio is for models that take audio, and {config.family} reads text")
    else:
        with working(show, f"reading {text}"):
            fit, kept = texts.read(args.text, folder, config)
    with working(show, f"fitting rows on {fit.count:,} tokens") as doing:
        fitted = candidates(plain, params, fit, kept, forms, dtype)
        rows = sorted(doing.counted(fitted, len(plan.rows)), key=lambda row: row.row)
    if not forms:  # of the model, not of a row
        rows = [dataclasses.replace(row, refused=refused) for row in rows]
    if args.forms != AUTO and (bad := [why for row in rows for why in row.refused.values()]):
        raise UsageError(f"{bad[0]}: it cannot be stored as {args.forms!r}; use --forms auto")

    def cost(picks: list[Candidate]) -> tuple[float, float]:
        return reference.distance(*served(plain, params, picks))

    def cache_bytes(plan: KVPlan, space: str = SELF) -> int:
        return cache_bytes_per_token(config, plan, dtype, space)

    def size(row: int, form: str) -> float:
        """Bytes per token of one row if all rows of its space have this form (inputs share one row)."""
        space = plan.rows[row].space
        every = plan.stored_as(form) if space == SELF else plan.with_cross(form)
        return cache_bytes(every, space) / sum(each.space == space for each in plan.rows)

    with working(show, f"measuring each row alone on {kept.count:,} tokens") as doing:
        reference = Reference(plain, params, kept, dtype)
        rounding = cost([])
        for i, row in enumerate(doing.counted(rows)):
            measured = (dataclasses.replace(c, **_pair(cost([c]))) for c in row.candidates)
            rows[i] = dataclasses.replace(row, candidates=tuple(measured))
    if args.forms == AUTO:
        with working(show, "choosing rows, and measuring the whole model"):
            chosen = choose.under(rows, size, rounding[0], bound, lambda picks: cost(picks)[0])
    else:
        chosen = choose.forced(rows)
        if plan.cross or args.max_kl is not None:
            choose.check(chosen, bound, plan.name)
    picks = [each.candidate for each in chosen if each.candidate]
    with working(show, "measuring every row stored in one way"):
        every_row = _every_row(plan, rows, cost)
        for hybrid in hybrids(plain, params, fit, kept, dtype) if plan.cross and "k" in forms else ():
            distance = reference.distance(hybrid.model, hybrid.params, hybrid.stored)
            every_row[f"{_SPACES[ENCODER]} hybrid {hybrid.how}"] = _pair(distance)
    slim, made = converted(model, params, picks)
    result = {
        "model": str(args.model),
        "text": None if args.audio else str(args.text or texts.DEFAULT.name),
        "audio": list(args.audio),
        "fit_tokens": fit.count,
        "kept_tokens": kept.count,
        "forms": args.forms,
        "refused": refused,
        "cache_dtype": dtype,
        "max_kl": bound,
        "bytes_per_token": {"kv": cache_bytes(plan), "now": cache_bytes(slim.plan)},
        "bytes_per_position": {"kv": cache_bytes(plan, ENCODER), "now": cache_bytes(slim.plan, ENCODER)},
        "keys_and_values": _pair(rounding),
        "whole": _pair(cost(picks)),
        "every_row": every_row,
        "rows": [_row(plan, *each) for each in zip(rows, chosen, strict=True)],
    }
    _print(result)
    save_pretrained(args.out, slim, made)
    plots.slim_errors(_curves(result["rows"]), args.out / "slim.png")
    return plots.save_result(result, args.out, "slim")


def _every_row(plan: KVPlan, rows: list[RowCandidates], cost) -> dict[str, dict[str, float]]:
    """The whole model with all rows stored in one way, for each way that all rows have. For a model with an
    encoder also with only its own rows, and only its source's rows, stored so."""
    parts = {"": rows}
    if plan.cross:
        for space, name in _SPACES.items():
            parts[f"{name} "] = [row for row in rows if plan.rows[row.row].space == space]
    out = {}
    for name, part in parts.items():
        candidates_of = [{(c.form, c.how): c for c in row.candidates} for row in part]
        shared = [way for way in candidates_of[0] if all(way in each for each in candidates_of)]
        out |= {name + " ".join(way): _pair(cost([each[way] for each in candidates_of])) for way in shared}
    return out


def _pair(measured: tuple[float, float]) -> dict[str, float]:
    return {"kl": measured[0], "agreement": measured[1]}


def _row(plan: KVPlan, ways: RowCandidates, chosen: Choice) -> dict:
    """One row's entry in slim.json."""

    def matrix(c: Candidate) -> str | None:
        return None if c.matrix is None else c.how

    picked = chosen.candidate
    return {
        "row": ways.row,
        "space": plan.rows[ways.row].space,
        "layers": list(plan.readers(ways.row)),
        "condition": ways.condition if math.isfinite(ways.condition) else None,
        "largest_w_kv": ways.largest,
        "form": picked.form if picked else "kv",
        "matrix": matrix(picked) if picked else None,
        "why": chosen.why,
        "candidates": [
            {"form": c.form, "matrix": matrix(c), "ridge": c.ridge, "error": c.error}
            | {"output_error": c.output_error, "kl": c.kl, "agreement": c.agreement}
            for c in ways.candidates
        ],
    }


def _print(result: dict) -> None:
    print(f"{result['fit_tokens']} tokens to fit on, {result['kept_tokens']} to measure on")
    print("row  layers         cond  form  matrix      error    output   KL alone  agreement")
    for row in result["rows"]:
        layers = f"{row['layers'][0]}-{row['layers'][-1]}" if len(row["layers"]) > 1 else row["layers"][0]
        condition = "inf" if row["condition"] is None else f"{row['condition']:.1e}"
        layers = f"cross {layers}" if row["space"] == ENCODER else layers
        head = f"{row['row']:3}  {layers!s:8} {condition:>10}  "
        for each in row["candidates"]:
            taken = (each["form"], each["matrix"]) == (row["form"], row["matrix"])
            errors = "  ".join(f"{each[name]:.1e}" for name in ("error", "output_error", "kl"))
            stored = f"{each['form']:4}  {each['matrix'] or '-':10}  "
            print(f"{head}{stored}{errors}   {each['agreement']:.3f}" + ("  <- taken" if taken else ""))
        if row["form"] == "kv":
            print(f"{head}kv    {row['why']}")
    for form, why in result["refused"].items():
        print(f"{form}: {why}")
    sizes = result["bytes_per_token"]
    distances = {}
    for way, measured in result["every_row"].items():
        part, _, rest = way.partition(" ")
        distances[f"every {part} row {rest}" if part in _SPACES.values() else f"every row {way}"] = measured
    distances[f"keys and values in {result['cache_dtype']}"] = result["keys_and_values"]
    for title, measured in (distances | {"converted": result["whole"]}).items():
        print(f"{title}: KL {measured['kl']:.1e}, agreement {measured['agreement']:.3f}")
    print(f"{sizes['now']} bytes per token instead of {sizes['kv']}")
    if result["bytes_per_position"]["kv"]:
        sizes = result["bytes_per_position"]
        print(f"{sizes['now']} bytes a position of a source instead of {sizes['kv']}")


def _curves(rows: list[dict]) -> dict[str, list[float]]:
    """Errors by row of each way of storing it, NaN where a row has none."""
    errors = [
        {f"{c['form']} {c['matrix']}": c["error"] for c in row["candidates"] if c["matrix"]} for row in rows
    ]
    names = dict.fromkeys(name for each in errors for name in each)
    return {name: [each.get(name, math.nan) for each in errors] for name in names}


def main(argv: list[str] | None = None) -> int:
    """The command line; exit code 0, 2 for bad input, 1 for a failure."""

    def run() -> None:
        convert(parser().parse_args(argv))

    return exit_code(run)
