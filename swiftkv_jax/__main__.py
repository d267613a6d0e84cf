"""`python -m swiftkv_jax`: the command `swiftkv`."""

import sys

from swiftkv_jax.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
