"""Write a picture of the page as README.md shows it.

python serve.py --http --compare runs/demo/swiftkv/export
PYTHONPATH=tests/server python tests/server/take_screenshot.py http://127.0.0.1:8000/ docs/page.png
"""

import sys
import tempfile
from pathlib import Path

from browser import Browser


def main(url: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as window:
        window.size(1100, 900)
        window.open(url)
        window.wait("document.querySelector('#status').textContent == 'ready'", 600)
        window.click(".sample[data-share='0.5']")
        window.wait("document.querySelector('#prompt').value.length > 200")
        window.type("#rounds", "5")
        window.click("#run")
        window.wait("document.querySelector('#status').textContent == 'done'", 600)
        window.screenshot(out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
