"""launch/: every command in its files is parsed by the program's own parser."""

import re
import shlex
import subprocess
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from swiftkv_jax.cli import train as distill
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.distill.fields import override
from swiftkv_jax.server import flags, limits
from swiftkv_jax.server import main as serving

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PARSERS = {"swiftkv-train": distill.parser, "swiftkv-serve": serving.build_parser}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def read(name: str) -> list[dict]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


YAML = sorted(path.name for path in LAUNCH.glob("*.yaml"))
DOCUMENTS = [(f"{name}[{i}]", document) for name in YAML for i, document in enumerate(read(name))]
DOCKERFILES = sorted(path.name for path in LAUNCH.glob("Dockerfile.*"))


def inside(value, path: tuple = ()) -> Iterator[tuple[tuple, typing.Any]]:
    """Every value in a document with its path; the document itself first."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from inside(item, (*path, key))


def own_commands(text: str) -> Iterator[list[str]]:
    """The words of every command of ours in a shell script, to the end of its line or of its quotes."""
    text = re.sub(r"^\s*#.*$", "", text.replace("\\\n", " "), flags=re.M)
    for found in re.finditer(r"(?:swiftkv-(?:train|serve)|python -m swiftkv_jax[\w.]*) [^\n]*", text):
        words = found[0].rstrip()
        yield shlex.split(words[:-1] if words.count('"') % 2 else words)


def understood(words: list[str], served_at: int | None = None) -> None:
    """The command's own parser takes its arguments; a config is loaded."""
    program, *given = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in words]
    assert program in SCRIPTS, program
    args = PARSERS[program]().parse_args(given)
    if program == "swiftkv-train":
        override(load_experiment(args.config), args.set)
        assert args.resume and args.out, "what a launcher starts again must go on"
    else:
        args.api_key_file = None  # it is not here
        flags.http_settings(args, args.model, None if args.insecure else "from a file or a secret")
        assert served_at in (None, flags.address(args.http)[1])


def containers(document: dict) -> list[dict]:
    """Every container of a Kubernetes object."""
    found = [value for path, value in inside(document) if path and path[-1] == "containers"]
    return [container for group in found for container in group]


@pytest.mark.parametrize("name, document", DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_containers_run_commands_of_ours_at_the_port_that_is_probed(name, document):
    for container in containers(document):
        [port] = [each["containerPort"] for each in container["ports"]]
        understood([*container["command"], *container["args"]], port)
        for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
            if container["command"] == ["swiftkv-serve"]:
                assert container[probe]["httpGet"] == {"path": path, "port": port} and path in limits.OPEN


def test_a_jobset_for_tpus_has_as_many_hosts_as_its_slice():
    """A slice's hosts have its chips; test_launchers.py joins the processes of the JobSet for H100."""
    [jobset] = read("jobset-tpu.yaml")
    [group] = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    x, y, z = map(
        int, job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    )
    chips = containers(jobset)[0]["resources"]["limits"]["google.com/tpu"]
    assert x * y * z == chips * job["parallelism"] and job["parallelism"] == job["completions"]


SHELL = {"slurm.sbatch": (LAUNCH / "slurm.sbatch").read_text()} | {
    f"{name}: {part}": document[part]
    for name, document in DOCUMENTS
    for part in ("setup", "run")
    if part in document
}


@pytest.mark.parametrize("name", SHELL)
def test_a_script_is_bash_and_runs_commands_of_ours(name):
    subprocess.run(["bash", "-n"], input=SHELL[name], text=True, check=True)
    found = list(own_commands(SHELL[name]))
    for words in found:
        understood(words)
    if name.endswith("setup"):
        [install] = SHELL[name].splitlines()
        [wanted] = re.findall(r"pip install '\.\[(.*)\]'$", install)
        assert {*wanted.split(",")} <= EXTRAS.keys()
    else:
        assert found


def test_a_service_of_skypilot_is_probed_where_it_answers():
    [task] = read("skypilot-serve.yaml")
    [words] = own_commands(task["run"])
    understood(words, task["resources"]["ports"])
    assert task["service"]["readiness_probe"]["path"] == "/ready"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_copies_what_the_package_is_made_of_and_runs_a_command_of_ours(name):
    text = (LAUNCH / name).read_text().replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    sources = [source for word, given in found if word == "COPY" for source in given.split()[:-1]]
    links = [p.resolve() for p in (ROOT / "swiftkv_jax").iterdir() if p.is_symlink()]
    made_of = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = [*made_of["tool"]["setuptools"]["package-dir"].values(), *made_of["project"]["license-files"]]
    needed = {path.split("/")[0] for path in folders}
    needed |= {path.relative_to(ROOT).parts[0] for path in links}
    assert needed | {"pyproject.toml", "README.md"} == {*sources}
    [extras] = re.findall(r"'\.\[(.*)\]'", text)
    assert {*extras.split(",")} <= EXTRAS.keys()
    [port] = [int(given) for word, given in found if word == "EXPOSE"]
    understood(yaml.safe_load(found[-1][1]), port)  # the exec form is JSON
    user = [word for word, _ in found].index("USER")
    assert all(word != "RUN" for word, _ in found[user:]), "what serves is not root"
