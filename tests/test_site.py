"""The documents as a site, without mkdocs: pages, links, anchors, and what commands write into them."""

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

import swiftkv_jax as skv
from benchmarks import report
from docs import reference

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
DOCUMENTS += [
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / n / "README.md" for n in ("demo", "launch")),
]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
WIDTH = 100


def slug(heading: str) -> str:
    """The anchor of a heading, on GitHub and on the site alike."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def anchors(path: Path) -> set[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    return {
        slug(after.content) for token, after in itertools.pairwise(tokens) if token.type == "heading_open"
    }


def links(path: Path) -> list[str]:
    """The targets of a document's links and images."""
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    children = [child for token in tokens for child in token.children or ()]
    found = [str(child.attrs.get("href") or child.attrs.get("src") or "") for child in children]
    return [link for link in found if link and not re.match(r"\w+:", link)]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name):
    path = ROOT / name
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_at_most_100_characters(name):
    """But for tables, code, and lines that are one link or command long."""
    fenced, long = False, []
    for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        free = fenced or line.startswith(("|", "    ", "```")) or " " not in line.strip("*- ")
        if len(line) > WIDTH and not free and "](http" not in line:
            long.append(f"{name}:{number}")
    assert not long


def test_the_navigation_has_every_page_once():
    """Documents outside docs/ become pages by docs/hooks.py."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    entries = [value for entry in config["nav"] for value in entry.values()]
    listed = [entry for entry in entries if isinstance(entry, list)]
    flat = [entry for entry in entries if isinstance(entry, str)]
    flat += [page for section in listed for entry in section for page in entry.values()]
    outside = dict(
        re.findall(r'^    "([\w./]+)": "([\w./]+)",$', (ROOT / "docs" / "hooks.py").read_text(), re.M)
    )
    wanted = [outside.get(name) or name.removeprefix("docs/") for name in NAMES]
    assert len(flat) == len({*flat}) and {*flat} == {*wanted}
    assert {*outside} == {name for name in NAMES if not name.startswith("docs/")}


def test_the_config_reference_is_that_of_the_dataclasses():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python docs/reference.py"


def test_every_field_of_the_config_reference_has_a_meaning():
    entries = re.findall(r"^\* `[\w.]+` \(.*?\)(:?)(?=\n|: )", reference.page(), re.M | re.S)
    assert len(entries) > 100 and "`)\n*" not in reference.page()


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_results(path):
    text = path.read_text(encoding="utf-8")
    assert "<!-- results: " in text and report.filled(text) == text, "run: python -m benchmarks.report"


def test_a_table_is_filled_in_between_its_marks(tmp_path, monkeypatch):
    run = {"command": "make it", "hardware": "2 CPU cores", "versions": "jax 1", "date": "2026-01-02"}
    made = {"run": run, "columns": ["a", "b"], "rows": [["x", 0.5], ["y", 0.25], ["z", None]]}
    (tmp_path / "made.json").write_text(json.dumps(made))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    before = "One\n<!-- results: made -->\nold\n<!-- end -->\nTwo\n"
    after = report.filled(before)
    assert "| x | 0.50 |\n| y | 0.25 |\n| z |  |\n" in after and "old" not in after
    assert "\n`make it`: 2 CPU cores, jax 1, 2026-01-02.\n" in after
    assert after.startswith("One\n<!--") and after.endswith("-->\nTwo\n") and report.filled(after) == after


def test_readmes_table_has_quality_and_speed_of_one_length():
    columns, *rows = [line.strip("| ").split(" | ") for line in report.block("summary").splitlines()]
    found = [dict(zip(columns, row, strict=True)) for row in rows[1:]]
    acrosskv = found[3]
    assert (acrosskv["context"], acrosskv["cache"]) == ("2048", "75%")
    assert float(acrosskv["gap, nats"]) == pytest.approx(3.4431 - 3.4386, abs=5e-4)
    assert {row["model"] for row in found} == {"demo, 3.6 M", "SmolLM2-135M"} and len(found) == 9


def test_every_record_names_its_run():
    names = re.findall(r"<!-- results: (\w+) -->", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert len(names) == len({*names}) > 9
    for name in names:
        if not (report.RESULTS / f"{name}.json").exists():
            assert "Not measured" in report.block(name)
            continue
        found = report.result(name)
        about = found.get("about", found)
        run = about.get("run") or about["machine"]
        assert run["command"].startswith(("python ", "make ", "swiftkv ")), name
        assert run.get("hardware") or run["device"], name
        assert re.fullmatch(r"2026-\d\d-\d\d", run["date"]), name
        assert not any(
            len(row) != len(found["columns"]) for row in found.get("rows", ()) if isinstance(row, list)
        )


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^::: swiftkv_jax\.(\w+)$", text, re.M)} == {*skv.__all__} - {"__version__"}


def test_troubleshooting_quotes_messages_of_the_code():
    """Each line that is bold code is a message; `...` stands for what differs."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\*\*(?:transformers: )?`(.*)`\*\*$", text, re.M)
    files = [*(ROOT / "swiftkv_jax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r'["\']\n\s*f?["\']', "", code)  # literals that Python joins
    assert len(quoted) > 9
    for message in quoted:
        for part in re.split(r'"?\.\.\."?', message):
            words = part.strip(" ;:,").removeprefix("no file named ")
            assert words in code or words in ("in", "tokens", "of"), (message, words)
