"""Generate a batch: `python serve.py --model DIR --input prompts.jsonl --output out.jsonl`.

Or serve OpenAI's API: `python serve.py --model DIR --http 127.0.0.1:8000`; the environment
variable SWIFTKV_API_KEY may hold a key.
"""

import sys

from swiftkv_jax.cli.commands import serve

if __name__ == "__main__":
    sys.exit(serve())
