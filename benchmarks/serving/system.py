"""A server process for one caching scheme, on the teacher's weights, without distillation.

    python -m benchmarks.serving.system --system swiftkv --model demo/teacher

Its speed is that of a distilled student, but not its texts. A line of JSON on stdout says where it listens
and what it runs; then it serves until SIGTERM. Prefixes are not shared, so every prompt token is computed.
"""

import argparse
import json
import sys

import swiftkv_jax as skv
from benchmarks.common import SYSTEMS, Variant, engine, machine, variants
from swiftkv_jax.common.errors import exit_code
from swiftkv_jax.server import server
from swiftkv_jax.server.app import Api
from swiftkv_jax.server.settings import HttpSettings
from swiftkv_jax.text.tokenizer import load_tokenizer


def system(name: str, layers: int, share: int) -> Variant:
    """The variant of a system's short name."""
    return dict(zip(SYSTEMS, variants(layers, share, "auto"), strict=True))[name]


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--system", choices=SYSTEMS, default="standard")
    p.add_argument("--model", default="demo/teacher", help="a standard model's folder")
    p.add_argument("--dtype", default="float32")
    sizes = {"share": 2, "context": 2048, "max-num-seqs": 16, "page-size": 64, "num-pages": None}
    for name, value in sizes.items():
        p.add_argument(f"--{name}", type=int, default=value, metavar="N")
    p.add_argument("--no-warm-up", action="store_true")
    args = p.parse_args()
    model, params = skv.from_pretrained(args.model, dtype=args.dtype)
    sizes = {"max_num_seqs": args.max_num_seqs, "page_size": args.page_size, "num_pages": args.num_pages}
    variant = system(args.system, model.config.num_layers, args.share)
    llm = engine(model, params, variant, args.context, tokenizer=load_tokenizer(args.model), **sizes)
    settings = HttpSettings(model_name=args.system, warm_up=not args.no_warm_up)
    listener = server.listen("127.0.0.1", 0)
    described = {"port": listener.getsockname()[1], "machine": machine("python -m benchmarks.serving")}
    described |= {"settings": vars(llm.settings), "kernels": llm.kernels}
    print(json.dumps(described | {"cache_bytes_per_token": llm.cache_bytes_per_token}), flush=True)
    return server.run(Api(llm, settings), listener, quiet=False)


if __name__ == "__main__":
    sys.exit(exit_code(main))
