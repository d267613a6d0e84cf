"""How many programs a command of the library asks for, finds in its cache, and compiles."""

import json

# The command, and at its end three counts on the last line of stdout.
PROGRAM = """
import collections, json, sys
import jax
from swiftkv_jax.cli import commands

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.update([event]))
code = commands.{command}()
cache = "/jax/compilation_cache/cache_"
names = "/jax/core/compile/backend_compile_duration", cache + "hits", cache + "misses"
print(json.dumps([seen[name] for name in names]))
sys.exit(code)
"""


def counts(said: str) -> list[int]:
    """[asked for, found, compiled] of what a program of `PROGRAM` wrote to stdout."""
    return json.loads(said.splitlines()[-1])
