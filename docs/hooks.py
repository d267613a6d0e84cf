"""The site's view of the repository: README.md is its home, and some documents outside docs/ are pages.

mkdocs calls these functions (`hooks` in mkdocs.yml). Documents link to each other as files of the repository;
here those links become links between pages.
"""

import os
import posixpath
import re

from mkdocs.structure.files import File

# A document outside docs/: its page.
PAGES = {
    "README.md": "index.md",
    "demo/README.md": "demo/README.md",
    "launch/README.md": "launch/README.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files, config):
    """Add the documents outside docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=os.path.abspath(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links to files of the repository into links to pages."""
    here = page.file.src_uri
    source = {page: path for path, page in PAGES.items()}.get(here, f"docs/{here}")
    return _LINK.sub(lambda match: linked(match, source, here, config.get("repo_url")), markdown)


def linked(match: re.Match, source: str, here: str, repository: str | None) -> str:
    """One link of the file `source`, whose page is `here`; one that leaves the site is text without an
    address of the repository."""
    image, text, target = match.groups()
    path, sharp, anchor = target.partition("#")
    if re.match(r"\w+:", target) or not path:
        return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    found = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if found is not None:
        return f"{image}[{text}]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{sharp}{anchor})"
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{sharp}{anchor})" if repository else text
