"""What rows of keys cost a model, by the dtype of a cache: docs/slim.md's table.

    python train.py --config configs/mha_teacher.py --out runs/mha_teacher
    python -m benchmarks.slim_error --model runs/mha_teacher/export

Each dtype is a run of `swiftkv slim --forms k`, on the demo's corpus.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, machine
from swiftkv_jax.cli.slim import convert
from swiftkv_jax.cli.slim import parser as slim_parser
from swiftkv_jax.common.errors import exit_code

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
COLUMNS = ["rows", "error of values by layer, exact", "calibrated", "KL, every row exact", "calibrated"]
COLUMNS += ["keys and values", "agreement, exact / calibrated / keys and values"]


def short(number: float, digits: str = ".2g") -> str:
    """A number with two digits."""
    return f"{number:{digits}}".replace("e-0", "e-") if number else "0"


def row(dtype: str, slim: dict) -> list[str]:
    """The table's row of one slim.json."""
    ways = ("exact", "calibrated")
    whole = [*(slim["every_row"][f"k {way}"] for way in ways), slim["keys_and_values"]]
    candidates = [each for row in slim["rows"] for each in row["candidates"]]
    errors = [", ".join(short(each["error"]) for each in candidates if each["matrix"] == way) for way in ways]
    agreement = " / ".join(f"{each['agreement']:.3f}" for each in whole)
    return [dtype, *errors, *(short(each["kl"], ".1e") for each in whole), agreement]


def measure(model: Path) -> dict:
    """A record of all dtypes, with the conditions of the model's W_K and what its cache takes."""
    run = machine(f"python -m benchmarks.slim_error --model {model}")
    record = {"run": run, "columns": COLUMNS, "rows": []}
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            given = ("--model", str(model), "--out", folder, "--forms", "k", "--cache-dtype", dtype)
            slim = convert(slim_parser().parse_args(given))
        record["rows"].append(row(dtype, slim))
        record.setdefault("bytes_per_token", {})[dtype] = slim["bytes_per_token"]
    record["conditions"] = [each["condition"] for each in slim["rows"]]
    record["tokens"] = {name: slim[f"{name}_tokens"] for name in ("fit", "kept")}
    return record


def main(argv: list[str] | None = None) -> int:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a multi-head checkpoint")
    parser.add_argument("--output", type=Path, default=RESULTS / "slim_error.json", metavar="FILE")

    def work() -> None:
        args = parser.parse_args(argv)
        args.output.write_text(json.dumps(measure(args.model), indent=2) + "\n", encoding="utf-8")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
