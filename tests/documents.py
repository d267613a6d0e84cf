"""The code in Markdown documents: Python blocks, and shell commands in blocks and between backticks.

Says too which test runs a command of a block, and why a few are run by none.
"""

import dataclasses
import re
import shlex
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += [ROOT / folder / "README.md" for folder in ("demo", "launch", "benchmarks/device")]
DOCUMENTS += [ROOT / "CONTRIBUTING.md"]
# The beginning of commands that no test runs, and why. Of each the words are checked by test_documents.py.
NOT_RUN = {
    r"git clone ": "fetches the repository from the network",
    r"cd ": "goes where the clone would lie",
    r"pip install ": "downloads packages",
    r"make ": "installs packages first; then it runs the tests, or scripts of the demo, which have tests",
    r"python docs/reference\.py|python -m benchmarks\.report": "rewrites documents; test_site.py does not",
    r"python -m benchmarks\.slim_error ": "four times the command before it; it has a test of its own",
    r"swiftkv kernels ": "checks kernels on an accelerator; test_check.py does what it calls",
    r".* gs://BUCKET": "needs a bucket; test_buckets.py has one in memory",
    r"srun ": "needs SLURM and 16 devices",
    r"xpk ": "needs a cluster of TPUs",
    r"swiftkv plan .* --compile-serving ": "compiles 80 layers; test_compile_only.py compiles 4",
    r"swiftkv replicas .*--num-gpus": "needs a Ray cluster with GPUs",
}
# The beginning of all others, and the test file that runs them; the first that fits counts.
RUN_BY = {
    r".* --compile-only ": "tests/aot/test_compile_only.py",
    r"python -m benchmarks\.device ": "tests/benchmarks/test_device.py",
    r"swiftkv replicas ": "tests/server/test_ray.py",
    r"lm_eval |python -m [\w.]+\.lm_eval ": "tests/server/test_lm_eval.py",
    r"python serve\.py (?!.*--http)": "tests/test_documents.py",
    r"python -m benchmarks\.papers\.(early_exit|prediction_flops|slim_tables)": "tests/test_documents.py",
    r"curl |python |swiftkv ": "tests/test_document_commands.py",
}

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


def why_not_run(command: Code) -> list[str]:
    """The reasons for which no test runs a command of a block: none, or one."""
    return [why for begin, why in NOT_RUN.items() if re.match(begin, command.text)]


def run_by(file: str) -> list[Code]:
    """The commands of blocks that a test file runs, each once, where it stands first."""
    chosen: dict[str, Code] = {}
    for each in found():
        if each.kind == "shell" and not why_not_run(each) and runner(each) == file:
            chosen.setdefault(each.text, each)
    return list(chosen.values())


def runner(command: Code) -> str | None:
    """The test file that runs a command of a block."""
    return next((file for begin, file in RUN_BY.items() if re.match(begin, command.text)), None)
