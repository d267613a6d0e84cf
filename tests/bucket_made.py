"""Buckets in memory: objects by name, read and written through fsspec, and through TensorStore by HTTP."""

import contextlib
import io
import json
import sys
import threading
import types
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

OBJECTS: dict[str, tuple[int, bytes]] = {}  # "bucket/name" -> its generation, its bytes
_LOCK = threading.Lock()


def put(name: str, content: bytes) -> int:
    with _LOCK:
        generation = OBJECTS.get(name, (0, b""))[0] + 1
        OBJECTS[name] = generation, content
    return generation


class Written(io.BytesIO):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def close(self) -> None:
        if not self.closed:
            put(self.name, self.getvalue())
        super().close()


class Buckets(AbstractFileSystem):
    """There are no folders: one is there while an object's name begins with it."""

    protocol = ("gs", "gcs")
    cachable = False

    def __init__(self, **_options):
        super().__init__()

    def ls(self, path, detail=True, **_options):
        path = self._strip_protocol(path)
        found = {name: self._facts(name) for name in [*OBJECTS] if name == path}
        for name in [name for name in [*OBJECTS] if name.startswith(f"{path}/")]:
            inner = name.removeprefix(f"{path}/").split("/")
            place = f"{path}/{inner[0]}"
            found[place] = (
                self._facts(name) if len(inner) == 1 else {"name": place, "size": 0, "type": "directory"}
            )
        if not found:
            raise FileNotFoundError(path)
        return [*found.values()] if detail else [*found]

    def _facts(self, name):
        generation, content = OBJECTS[name]
        crc = str(zlib.crc32(content))
        return {"name": name, "size": len(content), "type": "file", "crc32c": crc, "mtime": generation}

    def _open(self, path, mode="rb", **_options):
        path = self._strip_protocol(path)
        if mode == "wb":
            return Written(path)
        if path not in OBJECTS:
            raise FileNotFoundError(path)
        return io.BytesIO(OBJECTS[path][1])

    def makedirs(self, path, exist_ok=False): ...

    def mkdir(self, path, create_parents=True, **_options): ...

    def rm(self, path, recursive=False, maxdepth=None):
        path = self._strip_protocol(path)
        gone = [each for each in OBJECTS if each == path or (recursive and each.startswith(f"{path}/"))]
        if not gone:
            raise FileNotFoundError(path)
        for name in gone:
            del OBJECTS[name]

    def cp_file(self, path1, path2, **_options):
        put(self._strip_protocol(path2), OBJECTS[self._strip_protocol(path1)][1])


class Handler(BaseHTTPRequestHandler):
    """As much of Google's JSON API as TensorStore uses."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_): ...

    def _answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        return f"{bucket}{unquote(name)}", {key: one[0] for key, one in parse_qs(url.query).items()}

    def do_GET(self):
        name, options = self._asked()
        if "alt" not in options:
            prefix = f"{name}/{options.get('prefix', '')}"
            found = [each.partition("/")[2] for each in sorted(OBJECTS) if each.startswith(prefix)]
            return self._answer(200, json.dumps({"items": [{"name": each} for each in found]}).encode())
        if name not in OBJECTS:
            return self._answer(404)
        generation, content = OBJECTS[name]
        if options.get("ifGenerationNotMatch") == str(generation):
            return self._answer(304)
        told = {"x_goog_generation": str(generation)}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else len(content) - int(last)
            part = content[start : int(last) + 1 if first and last else None]
            told["Content_Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            return self._answer(206, part, **told)
        self._answer(200, content, **told)

    def do_POST(self):
        bucket, options = self._asked()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = f"{bucket}/{options['name']}"
        want = options.get("ifGenerationMatch")
        if want is not None and want != str(OBJECTS.get(name, (0, b""))[0]):
            return self._answer(412)
        generation = put(name, content)
        told = {"name": options["name"], "generation": str(generation), "size": str(len(content))}
        self._answer(200, json.dumps(told).encode())

    def do_DELETE(self):
        name, _ = self._asked()
        self._answer(204 if OBJECTS.pop(name, None) else 404)


@contextlib.contextmanager
def served(monkeypatch, home: Path):
    """Empty buckets in memory behind gs://; what is copied here lies in `home`."""
    OBJECTS.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, Buckets, clobber=True)
    storage = types.ModuleType("google.cloud.storage")
    storage.Client = lambda: types.SimpleNamespace(get_bucket=lambda _name: object())
    cloud = types.ModuleType("google.cloud")
    cloud.storage = storage
    monkeypatch.setitem(sys.modules, "google.cloud", cloud)
    monkeypatch.setitem(sys.modules, "google.cloud.storage", storage)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    yield OBJECTS
    server.shutdown()
    server.server_close()
