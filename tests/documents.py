"""The code in Markdown documents: Python blocks, and shell commands in blocks and between backticks."""

import dataclasses
import re
import shlex
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += [ROOT / folder / "README.md" for folder in ("demo", "launch", "benchmarks/device")]
DOCUMENTS += [ROOT / "CONTRIBUTING.md"]

PROGRAMS = ("python", "swiftkv", "make", "pip", "git", "cd", "curl", "lm_eval", "srun", "xpk")
_SHELL = ("sh", "bash", "shell", "console")
_NO_PROGRAM = ("", "text", "json", "yaml", "toml")


@dataclasses.dataclass(frozen=True)
class Code:
    """A piece of code. `kind`: "python", "shell" (one command of a block) or "inline" (between backticks)."""

    document: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text.splitlines()[0][:70]}"


def code(name: str, text: str) -> list[Code]:
    """Every piece of code in the document `name`. An indented block is shell if it begins with a program.

    Raises:
      ValueError: a fence names a language that no test can run.
    """
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        line, language = (token.map or [0])[0] + 1, token.info.split(" ")[0]
        indented = token.type == "code_block" and token.content.removeprefix("$ ").split()[0] in PROGRAMS
        if token.type == "fence" and language not in ("python", *_SHELL, *_NO_PROGRAM):
            raise ValueError(f"{name}:{line}: no test can run {language!r}")
        if language == "python":
            found.append(Code(name, line, "python", token.content))
        elif language in _SHELL or indented:
            found += [Code(name, line, "shell", shlex.join(words)) for words in commands(token.content)]
        for child in token.children or ():
            if child.type == "code_inline" and re.match(rf"({'|'.join(PROGRAMS)}) +[\w.'-]", child.content):
                found.append(Code(name, line, "inline", child.content))
    return found


def commands(block: str) -> list[list[str]]:
    """The words of each command: continued lines are one, prompts and comments go, `a && b` is two."""
    out: list[list[str]] = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&")
        words.whitespace_split = True
        out.append([])
        for word in words:
            if word == "&&":
                out.append([])
            else:
                out[-1].append(word)
    return [words for words in out if words]


def found() -> list[Code]:
    """Every piece of code in `DOCUMENTS`."""
    return [
        each
        for path in DOCUMENTS
        for each in code(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]


def shell(begin: str) -> list[Code]:
    """The commands of blocks that match `begin`, each once, where it stands first."""
    chosen: dict[str, Code] = {}
    for each in found():
        if each.kind == "shell" and re.match(begin, each.text):
            chosen.setdefault(each.text, each)
    return list(chosen.values())
