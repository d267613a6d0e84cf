"""Render chat templates in a separate process with little time and memory for each.

Run by `template.py`, never imported: JSON lines in, JSON lines out. Templates see the same environment as in
transformers. A template that exceeds a limit ends this process, and nothing else.
"""

import datetime
import functools
import json
import resource
import signal
import sys
import typing

_, _seconds, _bytes, _longest, *_roots = sys.argv
sys.path += _roots

import jinja2.ext  # noqa: E402 (found on the path that was just set)
import jinja2.nodes  # noqa: E402
import jinja2.sandbox  # noqa: E402
import jinja2.utils  # noqa: E402


class TooLong(Exception):
    """The rendered text exceeds the limit."""


class Spans(jinja2.ext.Extension):
    """`{% generation %}` blocks, and the characters [start, end) that each put into the text."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja reads it)

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(spans=[], written=0)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        text = caller()
        place: typing.Any = self.environment  # `extend` gave it two more attributes
        place.spans.append((place.written, place.written + len(text)))
        return text


class Dict:
    """The parts of `dict` that templates use, without the type itself."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args):
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names beginning with an underscore."""

    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        for name in (values := dict(*args, **kwargs)):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace holds no name like {name!r}")


def _refuse(message):
    raise jinja2.TemplateError(message)


def _json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(1)
def compiled(source: str) -> jinja2.Template:
    """A template in an environment of its own."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Spans, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _refuse, "dict": Dict(), "namespace": Namespace}
    return environment.from_string(source)


def render(template: str, values: dict, now: str | None) -> dict:
    """`{"text", "spans"}` of one chat; `now` is the date that `strftime_now` uses, today if None."""
    source = compiled(template)
    place: typing.Any = source.environment
    place.spans, place.written = [], 0
    moment = datetime.datetime.fromisoformat(now) if now else datetime.datetime.now()
    pieces = []
    for piece in source.generate({"strftime_now": moment.strftime} | values):
        pieces.append(piece)
        place.written += len(piece)
        if place.written > int(_longest):
            raise TooLong(f"its text is longer than {_longest} characters")
    return {"text": "".join(pieces), "spans": place.spans}


def answer(line: str) -> dict:
    """The answer to one request. The limit is on CPU time, so a busy machine refuses nothing."""
    signal.setitimer(signal.ITIMER_PROF, float(_seconds))  # SIGPROF ends the process
    try:
        return render(**json.loads(line))
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:
        return {"error": str(error)[:500] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (int(_bytes), int(_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for request in sys.stdin:
        print(json.dumps(answer(request)), flush=True)
