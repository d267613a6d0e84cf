"""Write pictures of the page, one for each of its modes: PREFIX-prompt.png and so on.

python serve.py --http --compare runs/demo/swiftkv/export
PYTHONPATH=tests/server python tests/server/take_screenshot.py http://127.0.0.1:8000/ docs/page
"""

import argparse
import tempfile
from pathlib import Path

from browser import Browser

DONE = "['done', ''].includes(document.querySelector('#status').textContent)"
MESSAGES = ("What does a cache keep?", "And when it is full?")


def prompt(window: Browser) -> None:
    window.click(".sample[data-share='0.5']")
    window.wait("document.querySelector('#prompt').value.length > 200")
    window.click("#run")


def lengths(window: Browser) -> None:
    window.click("#run")


def chat(window: Browser) -> None:
    window.type("#max-tokens", "32")
    for message in MESSAGES:
        window.wait("!document.querySelector('#run').disabled", 600)
        window.type("#message", message)
        window.click("#run")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("prefix")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--scheme", default="light", choices=["light", "dark"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as window:
        window.size(args.width, 900, mobile=args.width < 500)
        window.scheme(args.scheme)
        window.open(args.url)
        window.wait("document.querySelector('#status').textContent == 'ready'", 600)
        for name, ask in {"prompt": prompt, "lengths": lengths, "chat": chat}.items():
            window.run(f"document.querySelector('input[value={name}]').click()")
            ask(window)
            window.wait(f"document.querySelector('#run').disabled == false && {DONE}", 600)
            window.screenshot(Path(f"{args.prefix}-{name}.png"))


if __name__ == "__main__":
    main()
