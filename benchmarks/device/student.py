"""A student of a real model made in minutes: as rewired, after least squares, distilled; and its answers."""

import dataclasses
import json
import lzma
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.device.engine import compile_several
from demo import smollm2
from swiftkv_jax.cli.convert import costs
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.distill import loop
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.runner import MODES
from swiftkv_jax.kernels.check.supervisor import write_whole

PROMPTS = Path(__file__).with_name("prompts.txt")  # one a line, in no chat that a student trains on
STAGES = ("rewired", "least_squares", "distilled")
ASKED = ("Summarise this in two sentences:", "Explain this to a beginner:", "What is this about?")
CHATS = "chats.jsonl"
LANES = 64
EVALUATION_SHARE = 0.4  # share of a student's seconds for its last evaluation and its answers
ENDLESS = 100_000  # steps of a distillation that a time limit ends
WARM_UP = 10  # steps


def teacher(model: Sequence[str], folder: str, chats: str, count: int, words: int) -> Iterator[dict]:
    """Write `count` of the model's answers to questions about passages of the corpus into the file `chats`,
    as conversations that the student is trained on; yield its greedy answers to `PROMPTS`."""
    with lzma.open(DEMO / "corpus.jsonl.xz", "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    passages = [texts[i % len(texts)][400 * (i // len(texts)) :][:600] for i in range(count)]
    asked = [_asked(f"{ASKED[i % len(ASKED)]}\n\n{passage}") for i, passage in enumerate(passages)]
    llm = served(joined(model, Path(folder)), words)
    outputs = llm.chat(asked, SamplingParams(max_tokens=words, temperature=0.8, top_p=0.95), use_tqdm=False)
    texts = [{"role": "assistant", "content": output.outputs[0].text} for output in outputs]
    rows = [[*turns, text] for turns, text in zip(asked, texts, strict=True)]
    write_whole(Path(chats), "".join(json.dumps({"messages": row}) + "\n" for row in rows))
    yield {"chats": len(rows), "tokens_per_s": llm.stats["output_tokens_per_s"]}
    yield {"answers": answers(llm, words)}


def _asked(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


def served(model: Path, words: int) -> LLM:
    """The model for questions of at most 512 tokens, with as few programs as suffice: on a GPU each takes
    seconds to compile. Kernels are named, so that no check runs here."""
    llm = LLM(model, max_model_len=512 + words, max_num_seqs=LANES, kernels="xla")
    runner, mode = llm.engine.runner, MODES[-1]
    compile_several(runner, {("step", LANES, runner.budget), ("draw", LANES, mode), ("loop", LANES, mode)})
    return llm


def answers(llm: LLM, words: int) -> list[str]:
    """Greedy answers to `PROMPTS`."""
    asked = [_asked(line) for line in PROMPTS.read_text().splitlines()]
    outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=words), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def experiment(model: str, chats: Path, split: int, steps: int | None, rows: int) -> Experiment:
    """The demo's run on this model, with other rows, and the teacher's own chats beside the corpus. Without
    `steps` it runs at a constant learning rate until it is stopped."""
    e = smollm2.experiment(Path(model), split, chats=str(chats) if chats.exists() else "")
    if steps is None:
        steps, constant = ENDLESS, {"schedule": "constant", "warmup": WARM_UP / ENDLESS}
        e = dataclasses.replace(e, optimizer=dataclasses.replace(e.optimizer, **constant))
    attention = "xla"  # cuDNN has no float32; named, so that no check runs here
    data = dataclasses.replace(e.data, batch_size=rows)
    return dataclasses.replace(e, data=data, attention=attention, steps=steps, log_every=steps)


def student(
    model: Sequence[str], folder: str, chats: str, seconds: float, steps: int | None, rows: int, words: int
) -> Iterator[dict]:
    """Make a student whose prompts run half of the layers, and evaluate each stage; training stops when
    enough of `seconds` is left for the rest. Costs are of rows of 512 tokens, and of 2048 (`_long`)."""
    end = time.monotonic() + (1 - EVALUATION_SHARE) * seconds
    whole = joined(model, Path(folder))
    split = ModelConfig.from_hf(whole).num_layers // 2
    e = experiment(str(whole), Path(chats), split, steps, rows)
    with (
        tempfile.TemporaryDirectory() as scratch,
        loop.opened(e, Path(scratch) / "run", say=lambda line: print(line, file=sys.stderr)) as run,
    ):
        length = e.data.seq_len

        def stage(name: str) -> dict:
            return {name: costs(run, run.row_sums()[length], length), f"{name}_long": smollm2.long_rows(run)}

        yield stage("rewired")
        began = time.perf_counter()
        run.fit_start()
        yield {"least_squares_seconds": time.perf_counter() - began} | stage("least_squares")
        began = time.perf_counter()
        done = _until(end, run)
        took = time.perf_counter() - began
        speed = {"distilled_seconds": took, "trained_tokens_per_s": done * rows * length / took}
        yield {"kernels": run.kernels, "steps": done, **speed}
        yield stage("distilled")
        run.export(Path(scratch) / "export")
        yield {"answers": answers(served(Path(scratch) / "export", words), words)}


def _until(end: float, run: loop.Run) -> int:
    """Train to the last step, or until a time limit ends the run as a signal would; returns the steps
    done."""
    left = max(1.0, end - time.monotonic())
    clock = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # in case the signal comes before the first step
    clock.start()
    try:
        return run.go().step
    finally:
        clock.cancel()
        clock.join()
        signal.signal(signal.SIGTERM, usual)


def joined(parts: Sequence[str], folder: Path) -> Path:
    """A model's folder or GGUF file; a file that was cut, `split -n 2 FILE.gguf`, is joined in `folder`."""
    if len(parts) == 1:
        return Path(parts[0])
    whole = folder / "model.gguf"
    if not whole.exists():
        draft = whole.with_suffix(".part")
        with draft.open("wb") as out:
            for part in parts:
                with Path(part).open("rb") as file:
                    shutil.copyfileobj(file, out)
        draft.replace(whole)
    return whole
