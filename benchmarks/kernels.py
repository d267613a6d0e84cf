"""Time of every kernel at its real shapes, as a share of a copy and a matmul measured in the same run.

    python -m benchmarks.kernels [--platform gpu|tpu|cpu] [--kernel NAME] [--case NAME] [--minutes 10]

Contenders of a case take turns; a time is the median over the rounds. Writes Markdown and JSON under
benchmarks/results/. On a CPU the cases are the tests' small ones, only to see that it runs.
"""

import argparse
import datetime
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.common import RESULTS, not_measured, table, write
from benchmarks.device import hardware
from benchmarks.kernel_peers import peers
from swiftkv_jax.kernels.check.calls import OPERATIONS, medians
from swiftkv_jax.kernels.check.machine import versions
from swiftkv_jax.kernels.common.case import Case
from swiftkv_jax.kernels.fused_kv_fill.cases import UNFUSED

KERNELS = [name for name, operation in OPERATIONS.items() if operation.small]


def contenders(kernel: str, case: Case) -> dict[str, tuple[Callable, int]]:
    """Name -> (a function that makes a call, calls that its result makes): our implementations, and other
    libraries' on contiguous keys and values."""
    names = [name for name in OPERATIONS[kernel].table if name != "reference"]
    names += [UNFUSED] if kernel == "fused_kv_fill" else []
    made = {name: (functools.cache(functools.partial(case.timed, name)), case.repeats) for name in names}
    others = peers(case) if kernel == "paged_attention" else {}
    return made | {name: (functools.cache(make), 1) for name, make in others.items()}


def measure(made: dict[str, tuple[Callable, int]], rounds: int) -> dict[str, float | str]:
    """Median seconds of a call by each contender, or why it did not run."""
    failed: dict[str, float | str] = {}
    for name, (make, _) in made.items():
        try:
            jax.block_until_ready(make()())
        except Exception as error:  # a missing peer, or a shape that it refuses, becomes a line in the table
            failed[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    ran = {name: each for name, each in made.items() if name not in failed}
    seconds = medians([make() for make, _ in ran.values()], rounds=rounds)
    return {name: s / count for (name, (_, count)), s in zip(ran.items(), seconds, strict=True)} | failed


def run(platform: str, kernels: list[str], only: str | None, rounds: int, deadline: float) -> dict:
    """Every case of the kernels: seconds of each contender and the work they share."""
    small = platform == "cpu"
    top: dict[str, float] = {}
    for part in hardware.ceilings("tiny" if small else "llama8b"):
        top |= part
    cases, missing = [], []
    for kernel in kernels:
        for name, case in (OPERATIONS[kernel].small if small else OPERATIONS[kernel].real).items():
            if only not in (None, name):
                continue
            if time.perf_counter() > deadline:
                missing.append(f"{kernel} {name}")
                continue
            seconds = measure(contenders(kernel, case), rounds)
            work = {"flops": case.flops, "bytes": case.bytes}
            floor = max(work[what] / top[what] for what in work)
            cases.append({"kernel": kernel, "case": name, **work, "floor": floor, "seconds": seconds})
            print(f"{kernel} {name}: {seconds}", flush=True)
    about = {"device": jax.devices()[0].device_kind, "date": datetime.date.today().isoformat()}
    about |= {"versions": versions(("jax", "jaxlib")), "ceilings": top}
    return about | {"cases": cases, "no_time_for": missing}


def markdown(result: dict) -> str:
    """The table: time, bandwidth, FLOP rate, and the share of the floor that the ceilings give."""
    top = result["ceilings"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = (
        f"# Kernels on {result['device']}\n\n{result['date']}, {packages}. Measured ceilings: copy "
        f"{top['bytes'] / 1e9:.0f} GB/s, bfloat16 matmul {top['flops'] / 1e12:.1f} TFLOP/s. Share: the"
        " time these allow over the time taken.\n\n"
    )
    rows = []
    for case in result["cases"]:
        for name, seconds in case["seconds"].items():
            if isinstance(seconds, str):
                figures = [f"not run: {seconds.replace('|', '/')}", "", "", ""]
            else:
                rates = f"{case['bytes'] / seconds / 1e9:.1f}", f"{case['flops'] / seconds / 1e12:.3f}"
                figures = [f"{seconds * 1e3:.3f}", *rates, f"{100 * case['floor'] / seconds:.1f} %"]
            rows.append([case["kernel"], case["case"], name, *figures])
    text = head + table(["kernel", "case", "by", "ms", "GB/s", "TFLOP/s", "share"], rows) + "\n"
    left_out = ", ".join(result["no_time_for"])
    return text + (f"\nNo time was left for: {left_out}.\n" if left_out else "")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--platform", choices=["gpu", "tpu", "cpu"])
    parser.add_argument("--kernel", choices=KERNELS, help="one kernel instead of all")
    parser.add_argument("--case", help="one case instead of all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no case begins (default 10)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    platform = options.platform or jax.default_backend()
    # A subset of the cases is written to another file, so that the whole table is kept.
    name = "_".join(filter(None, ("kernels", platform, options.kernel, options.case)))
    try:
        jax.devices(platform)
    except RuntimeError:
        command, where = f"python -m benchmarks.kernels --platform {platform}", options.output
        print(not_measured(f"kernels_{platform}", f"Kernels on {platform}", platform, command, where))
        return 1
    with jax.default_device(jax.devices(platform)[0]):
        kernels = [options.kernel] if options.kernel else KERNELS
        deadline = time.perf_counter() + 60 * options.minutes
        result = run(platform, kernels, options.case, options.rounds, deadline)
    write(name, result, markdown(result), options.output)
    print(options.output / f"{name}.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
