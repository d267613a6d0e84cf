"""Make the demo corpus from the reStructuredText sources of the Python documentation.

The sources are those of Debian's package python3.11-doc (LICENSE-corpus.txt names the version used):

    apt-get download python3.11-doc
    dpkg -x python3.11-doc_*.deb unpacked
    python demo/make_corpus.py unpacked/usr/share/doc/python3.11/html/_sources
"""

import argparse
import json
import lzma
import re
from hashlib import sha256
from pathlib import Path

FOLDERS = ("extending", "faq", "howto", "library", "reference", "tutorial", "using", "whatsnew")
SUFFIX = ".rst.txt"
PIECE_CHARS = 24_000
MIN_CHARS = 1_000  # below this a source is a table of contents or a stub
MAX_RAW_BYTES = 7_500_000
MAX_FILE_BYTES = 2_000_000
SHINGLE_WORDS = 8
MAX_SHARED = 0.5

# Markup that only steers Sphinx (or names authors), with its indented block.
NOISE = re.compile(
    r"^(?P<indent> *)\.\. "
    r"(?:index|toctree|sectionauthor|moduleauthor|highlight|tabularcolumns|contents)::.*\n"
    r"(?:(?P=indent) +\S.*\n|\n(?=(?P=indent) +\S))*",
    re.MULTILINE,
)
# A section title, with the labels and the overline that belong to it.
SECTION = re.compile(
    r"^(?:\.\. _.*:\n+)*(?:([=*#\"])\1{2,}\n)?\S.*\n([=\-~^*#\"+'`])\2{2,}$",
    re.MULTILINE,
)
PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")
BLANK_LINE = re.compile(r"(?<=\n\n)")


def held_out(document_id: str) -> bool:
    """Whether a piece belongs to the held-out documents; all pieces of one source agree."""
    return int(sha256(document_id.split("#")[0].encode()).hexdigest()[:8], 16) % 20 == 0


def clean(text: str) -> str:
    """Drop steering markup and surplus white space; keep the reStructuredText as it is."""
    lines = (line.rstrip() for line in text.expandtabs(8).splitlines())
    text = NOISE.sub("", "\n".join(lines) + "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def prose_share(text: str) -> float:
    """The share of lower-case letters: low in tables and listings, high in running text."""
    return sum(map(str.islower, text)) / len(text)


def read_sources(root: Path) -> dict[str, str]:
    """Cleaned sources by id, which is the path below root, in the order of their ids."""
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*" + SUFFIX)]
    if not paths:
        raise SystemExit(f"no *{SUFFIX} files in the documentation folders of {root}")
    named = {path.relative_to(root).as_posix(): path for path in paths}
    texts = {name: clean(named[name].read_text(encoding="utf-8")) for name in sorted(named)}
    return {name: text for name, text in texts.items() if len(text) >= MIN_CHARS}


def drop_duplicates(texts: dict[str, str]) -> dict[str, str]:
    """Keep a document only if fewer than half of its word shingles occur in those kept before it."""
    seen: set[str] = set()
    kept = {}
    for name, text in texts.items():
        words = text.split()
        shingles = {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}
        if shingles and len(shingles & seen) < MAX_SHARED * len(shingles):
            seen |= shingles
            kept[name] = text
    return kept


def fit_budget(texts: dict[str, str]) -> dict[str, str]:
    """Drop the documents with the least running text until the rest fits MAX_RAW_BYTES."""
    size = sum(len(text.encode()) for text in texts.values())
    kept = dict(texts)
    for name in sorted(texts, key=lambda name: (prose_share(texts[name]), name)):
        if size <= MAX_RAW_BYTES:
            break
        size -= len(kept.pop(name).encode())
    return kept


def split(text: str) -> list[str]:
    """Cut a text into about equal pieces of at most PIECE_CHARS, where possible before a section title."""
    pieces = []
    while len(text) > PIECE_CHARS:
        target = len(text) // -(-len(text) // PIECE_CHARS)
        for boundary in (SECTION, PARAGRAPH, BLANK_LINE):
            starts = (match.start() for match in boundary.finditer(text, target // 2, PIECE_CHARS))
            cut = min(starts, key=lambda start: abs(start - target), default=0)
            if cut:
                break
        cut = cut or PIECE_CHARS
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, help="the folder html/_sources of the documentation package")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("corpus.jsonl.xz"))
    arguments = parser.parse_args()

    texts = fit_budget(drop_duplicates(read_sources(arguments.sources)))
    records = [
        {"id": f"{name}#{number}", "text": piece}
        for name, text in texts.items()
        for number, piece in enumerate(split(text))
    ]
    raw = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    if len(packed) > MAX_FILE_BYTES:
        raise SystemExit(
            f"{len(packed)} bytes compressed; lower MAX_RAW_BYTES to stay under {MAX_FILE_BYTES}"
        )
    arguments.output.write_bytes(packed)
    size = sum(len(text.encode()) for text in texts.values())
    share = sum(len(text.encode()) for name, text in texts.items() if held_out(name)) / size
    print(f"{len(texts)} documents, {len(records)} pieces, {size} bytes of text, {len(packed)} compressed")
    print(f"{share:.1%} of the text is held out")


if __name__ == "__main__":
    main()
