"""Load spoilt folders, one after the other, and watch: what was imported, opened, started; how long it took.

    python load_spoilt.py WORK FIRST COUNT

prints a JSON line for each folder, and at the end one of the whole. WORK holds `good/*`, folders that load,
and `outside`, that nobody may read.
"""

import ctypes
import faulthandler
import json
import math
import os
import resource
import shutil
import struct
import sys
import time
import warnings
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import transformers
from mutations import Folder

from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.engine.llm import LLM

STUCK_S = 300
CHAT = {"messages": [{"role": "user", "content": "the cat"}]}
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
STARTS = "subprocess.Popen os.system os.exec os.posix_spawn socket.connect ctypes.dlopen".split()
_OPENED: list[str] = []
_STARTED: list[list[str]] = []


def hook(event: str, arguments: tuple) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes):
        _OPENED.append(os.fsdecode(arguments[0]))
    elif event in STARTS:
        _STARTED.append([event, str(arguments)[:2000]])


class Watch:
    """Every opening and reading of a file in a folder, whoever does it, Rust and C included (inotify)."""

    def __init__(self, folder: Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        opened, accessed = 0x20, 0x01
        watched = libc.inotify_add_watch(self._fd, os.fsencode(folder), opened | accessed)
        assert watched > 0, ctypes.get_errno()

    def touched(self) -> bool:
        try:
            return bool(os.read(self._fd, 65536))
        except BlockingIOError:
            return False


def total(folder: Path, dtype: str) -> tuple[float, int]:
    """Sum of the finite values of a folder's tensors in `dtype`, and how many are not; read by hand."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    names = {single.name} if single.exists() else set(json.loads(index.read_text())["weight_map"].values())
    values = []
    for file in (folder / name for name in names):
        content = file.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        for name, entry in header.items():
            if name == "__metadata__" or name.endswith("rotary_emb.inv_freq"):
                continue
            start, end = entry["data_offsets"]
            values.append(np.frombuffer(data[start:end], DTYPES[entry["dtype"]]).astype(np.dtype(dtype)))
    return summed(values)


def summed(arrays) -> tuple[float, int]:
    flat = np.concatenate([np.asarray(array).astype(np.float64).ravel() for array in arrays])
    return math.fsum(flat[np.isfinite(flat)]), int((~np.isfinite(flat)).sum())


def attempt(folder: Path) -> str:
    """ "" for a folder that loaded, and rightly; the error's text otherwise."""
    chats = (folder / "chat_template.jinja").exists()
    try:
        llm = LLM(folder, max_num_seqs=2)
        llm.request("the cat sat é 猫 \x00")
        if chats:
            llm.request(CHAT)
    except UsageError as error:
        text = str(error)
        assert text and len(text) < 3000 and "\n" not in text and "Traceback" not in text, text
        return text
    found = summed(jax.tree.leaves(llm.params))
    want = total(folder, llm.model.dtype)
    tied = llm.model.config.tie_word_embeddings
    assert tied or found == want, f"other weights than the file's: {found}, {want}"
    return ""


def own(name: str) -> bool:
    """Whether a module is one that transformers fetches from where it is installed: its own, of the tokenizer
    class that a folder names, and, when a tokenizer fails, protobuf, for its errors."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    if name.startswith("transformers.models."):
        return file.startswith(f"{Path(transformers.__file__).parent}{os.sep}")
    return name.split(".")[0] == "google" and (not file or file.startswith(sys.prefix))


def main(work: Path, first: int, count: int) -> None:
    warnings.simplefilter("ignore", UsageWarning)  # to show one, Python opens the line of source it is from
    good = sorted((work / "good").iterdir())
    for folder in good:
        assert attempt(folder) == "", folder
    sys.addaudithook(hook)
    watch, modules, most = Watch(work / "outside"), set(sys.modules), 0.0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(first, first + count):
        folder = work / "spoilt"
        shutil.copytree(good[seed % len(good)], folder)
        what = Folder(folder, work / "outside", seed).spoil()
        watch.touched(), _OPENED.clear(), _STARTED.clear()
        os.chdir(folder)
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        processor, clock = sum(os.times()[:4]), time.monotonic()
        failure = ""
        try:
            said = attempt(folder)
        except BaseException as error:
            said, failure = "", f"{type(error).__name__}: {error}"[:600]
        seconds = sum(os.times()[:4]) - processor
        faulthandler.cancel_dump_traceback_later()
        homes = (str(folder), "/dev/null", sys.prefix, sys.base_prefix)
        strangers = [path for path in _OPENED if path.startswith("/") and not path.startswith(homes)]
        strangers += [f"read outside: {what}"] if watch.touched() else []
        started = [each for each in _STARTED if "template_worker.py" not in each[1]]
        ran = [str(path) for path in folder.rglob("ran")] + [str(path) for path in Path.cwd().glob("ran")]
        imported = sorted(name for name in set(sys.modules) - modules if not own(name))
        line = {
            "seed": seed, "what": what, "said": said, "failure": failure, "opened": strangers,
            "started": started, "imported": imported, "ran": ran, "seconds": round(seconds, 3),
            "wall": round(time.monotonic() - clock, 3),
        }  # fmt: skip
        modules |= set(sys.modules)
        most = max(most, seconds)
        print(json.dumps(line), flush=True)
        os.chdir(work)
        shutil.rmtree(folder)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    print(json.dumps({"grown_mib": grown / 1024, "most_seconds": most}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
