"""The servers that are compared: started here, one process for each system, or already running elsewhere."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.serving.client import Target
from swiftkv_jax.common.errors import UsageError

ROOT = Path(__file__).parents[2]
_COMPILED = re.compile(r"^\w*?compilations_total(?:\{.*\})? (\S+)$", re.M)
_START_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that is ready. `described`: what its process says of itself, empty for an existing server."""

    name: str
    target: Target
    described: dict

    def compilations(self) -> float | None:
        """Programs compiled so far; None where the server does not say."""
        try:
            text = _get(f"{self.target.url}/metrics").decode()
        except OSError:
            return None
        count = _COMPILED.search(text)
        return float(count[1]) if count else None


def found(name: str, url: str) -> Server:
    """An existing server that runs elsewhere.

    Raises:
      UsageError: it does not answer, or lists no model.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        [card, *_] = json.loads(_get(f"{url}/v1/models"))["data"]
        return Server(name, Target(url, card["id"]), {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"no server of OpenAI's API at {url} ({type(error).__name__}: {error})") from None


@contextlib.contextmanager
def started(name: str, flags: list[str], say) -> Iterator[Server]:
    """Start one of our servers in another process and wait until it is ready; it is stopped at the end.

    Raises:
      UsageError: it ended before it was ready; the message has its last output.
    """
    command = [sys.executable, "-m", "benchmarks.serving.system", "--system", name, *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                process.wait()
                raise _died(name, log)
            described = json.loads(line)
            url = f"http://127.0.0.1:{described['port']}"
            say(f"{name}: warming up")
            deadline = time.monotonic() + _START_S
            while not _is_ready(url):
                if process.poll() is not None:
                    raise _died(name, log)
                if time.monotonic() > deadline:
                    raise UsageError(f"{name} was not ready within {_START_S:g} s")
                time.sleep(0.1)
            yield Server(name, Target(url, name), described)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError):
        return json.loads(_get(f"{url}/ready"))["warm"]
    return False


def _died(name: str, log) -> UsageError:
    log.seek(0)
    last = (log.read().strip().splitlines() or ["no word"])[-1]
    hint = "; where a device's memory holds one model only, pass --alone" if "memory" in last.lower() else ""
    return UsageError(f"the server {name} ended: {last[:300]}{hint}")


def _get(url: str) -> bytes:
    """The body of a 200. Raises OSError for anything else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return answer.read()
