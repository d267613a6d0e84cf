"""Pass on the stderr of one of several processes; JAX's report of a dead peer becomes one line.

This is a separate program that does not import the library: `processes.start` connects the process's stderr
to its stdin. JAX's C++ reacts to a dead peer with a dozen lines, a stack trace and abort(), which
Python in that process cannot catch.
"""

import os
import re
import select
import signal

_FATAL = b"Terminating process because the JAX distributed service detected fatal errors"
_BEFORE = re.compile(rb"^[EW]\d{4} .*(coordination_service|preemption_sync_manager)\w*\.cc:")
_HOLD_S = 2.0  # longest time between the first of those lines and the fatal one
GONE = "error: another process of this run has ended, so this one ends too; the other's log says why\n"


def main() -> None:
    """Pass on until the process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the process, which may still print
        signal.signal(number, signal.SIG_IGN)
    rest, suspended, reported = b"", b"", False
    while True:
        if suspended and _FATAL not in suspended and not select.select([0], [], [], _HOLD_S)[0]:
            os.write(2, suspended)  # it was not a death after all
            suspended = b""
        chunk = os.read(0, 2**16)
        *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        if not chunk or rest.endswith(b"\n"):
            lines, rest = [*lines, rest], b""
        for line in lines:
            if suspended or _FATAL in line or _BEFORE.match(line):
                suspended += line
            else:
                reported |= line.startswith(b"error: ")
                os.write(2, line)
        if not chunk:
            break
    if _FATAL in suspended:
        suspended = b"" if reported else GONE.encode()
    os.write(2, suspended)


if __name__ == "__main__":
    main()
