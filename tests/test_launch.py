"""launch/: every file is held to the types of its API, and every command in it to the program's own parser.

The schemas have the fields that our files use, with the types and the required ones of the public
definitions: Kubernetes 1.33 (Pod, Job, Deployment), JobSet v1alpha2, KServe v1beta1, Gateway API v1 with its
inference extension v1, and SkyPilot's task. A field that is not in them is refused.
"""

import copy
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
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.distill.fields import override
from swiftkv_jax.server import flags, limits
from swiftkv_jax.server import main as serving

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PARSERS = {"swiftkv-train": distill.parser, "swiftkv-serve": serving.build_parser}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# A schema: a type; a set, of which one; a list of one schema; a dict of fields, "!" marks those that must be
# there; {str: type}, a map with any keys.
MAP, NOTHING = {str: str}, type(None)
OBJECT = {"name!": str, "labels": MAP, "annotations": MAP}
PROBE = {"httpGet!": {"path!": str, "port!": int}, "periodSeconds": int, "failureThreshold": int}
SOURCE = {"fieldRef": {"fieldPath!": str}, "secretKeyRef": {"name!": str, "key!": str}}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str, "valueFrom": SOURCE}],
    "ports": [{"containerPort!": int, "protocol": {"TCP", "UDP", "SCTP"}}],
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "resources": {"limits": {str: int}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
CLAIM = {"claimName!": str}
POD = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "terminationGracePeriodSeconds": int,
    "nodeSelector": MAP,
    "containers!": [CONTAINER],
    "volumes": [{"name!": str, "persistentVolumeClaim": CLAIM, "emptyDir": {"medium": {"", "Memory"}}}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "backoffLimit": int,
    "template!": {"spec!": POD},
}
JOBSET = {
    "failurePolicy": {"maxRestarts": int},
    "network": {"enableDNSHostnames": bool},
    "replicatedJobs!": [{"name!": str, "replicas": int, "template!": {"spec!": JOB}}],
}
DEPLOYMENT = {
    "replicas": int,
    "selector!": {"matchLabels!": MAP},
    "template!": {"metadata!": {"labels!": MAP}, "spec!": POD},
}
POOL = {
    "selector!": {"matchLabels!": MAP},
    "targetPorts!": [{"number!": int}],
    "endpointPickerRef": {"name!": str, "port": {"number!": int}},
}
MATCH = {"path": {"type": {"Exact", "PathPrefix", "RegularExpression"}, "value": str}}
ROUTE = {
    "parentRefs": [{"name!": str}],
    "rules": [{"matches": [MATCH], "backendRefs": [{"group": str, "kind": str, "name!": str}]}],
}
PREDICTOR = POD | {
    "minReplicas": int,
    "maxReplicas": int,
    "scaleMetric": {"cpu", "memory", "concurrency", "rps"},
    "scaleTarget": int,
    "timeout": int,
}
KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET,
    ("apps/v1", "Deployment"): DEPLOYMENT,
    ("inference.networking.k8s.io/v1", "InferencePool"): POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE,
    ("serving.kserve.io/v1beta1", "InferenceService"): {"predictor!": PREDICTOR},
}
SKY = {
    "name": str,
    "workdir": str,
    "resources": {"accelerators": str, "ports": int},
    "envs": {str: NOTHING},  # to be given with --env
    "secrets": {str: NOTHING},
    "file_mounts": {str: {"source": str, "mode": {"MOUNT", "COPY", "MOUNT_CACHED"}}},
    "service": {"replicas": int, "readiness_probe!": {"path!": str, "initial_delay_seconds": int}},
    "setup": str,
    "run": str,
}


def check(value, schema, where: str = "") -> None:
    """Raise a TypeError that names the place where `value` is not what `schema` says."""
    if isinstance(schema, set):
        if value not in schema:
            raise TypeError(f"{where}: {value!r} is none of {sorted(schema)}")
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            raise TypeError(f"{where} must be a list with something in it")
        for number, item in enumerate(value):
            check(item, schema[0], f"{where}[{number}]")
    elif not isinstance(schema, dict):
        if type(value) is not schema:  # True is an int to isinstance
            raise TypeError(f"{where} must be {schema.__name__}, not {value!r}")
    elif not isinstance(value, dict):
        raise TypeError(f"{where} must be a mapping, not {value!r}")
    elif str in schema:
        for key, item in value.items():
            check(key, str, f"the key {where}.{key}")
            check(item, schema[str], f"{where}.{key}")
    else:
        fields = {name.rstrip("!"): each for name, each in schema.items()}
        absent = {name[:-1] for name in schema if name.endswith("!")} - value.keys()
        if absent or value.keys() - fields.keys():
            raise TypeError(f"{where} lacks {absent}, has {value.keys() - fields.keys()}")
        for name, item in value.items():
            check(item, fields[name], f"{where}.{name}")


def schema_of(document: dict):
    """The schema of a Kubernetes object by its kind; of a SkyPilot task else."""
    if "kind" not in document:
        return SKY
    spec = KINDS[document["apiVersion"], document["kind"]]
    return {"apiVersion!": str, "kind!": str, "metadata!": OBJECT, "spec!": spec}


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


@pytest.mark.parametrize("name, document", DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_documents_fit_the_schema_of_their_api_and_corrupted_ones_do_not(name, document):
    """Spoilt: a list in the place of any value, or a field whose name is not known."""
    schema = schema_of(document)
    check(document, schema, name)
    for path, value in inside(document):
        if not path or path in (("apiVersion",), ("kind",)):
            continue
        spoilt = copy.deepcopy(document)
        place = spoilt
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = {"no": []} if isinstance(value, list) else []
        with pytest.raises(TypeError):
            check(spoilt, schema, name)
        if isinstance(value, dict) and path[-1] in ("spec", "template", "resources", "service", "httpGet"):
            place[path[-1]] = value | {"nothingSuch": 1}
            with pytest.raises(TypeError, match="nothingSuch"):
                check(spoilt, schema, name)


def test_a_missing_required_field_is_reported():
    [jobset] = read("jobset-h100.yaml")
    del jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["image"]
    with pytest.raises(TypeError, match=r"containers\[0\] lacks {'image'}"):
        check(jobset, schema_of(jobset))


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
        serves = container["command"] == ["swiftkv-serve"]
        understood([*container["command"], *container["args"]], port)
        assert serves == ("readinessProbe" in container)
        for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")) if serves else ():
            assert container[probe]["httpGet"] == {"path": path, "port": port} and path in limits.OPEN
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = [value for path, value in inside(document) if path and path[-1] == "volumes"]
        assert mounts.keys() == {volume["name"] for volume in volumes[0]}
        roots = tuple(f"{place}/" for place in mounts.values())
        folders = [word.partition("=")[2] or word for word in container["args"] if "/" in word]
        assert folders and all(folder.startswith(roots) for folder in folders)


def test_the_pool_and_its_route_find_the_pods():
    deployment, pool, route = read("inferencepool.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = containers(deployment)[0]["ports"]
    assert [p["number"] for p in pool["spec"]["targetPorts"]] == [p["containerPort"] for p in ports]
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {
        "group": pool["apiVersion"].split("/")[0],
        "kind": pool["kind"],
        "name": pool["metadata"]["name"],
    }
    assert "--metrics-prefix=vllm:" in containers(deployment)[0]["args"], "the names that the picker reads"


def test_processes_of_a_jobset_get_the_right_counts_and_addresses():
    """The number of processes and pod 0's name follow from the JobSet; a slice's hosts have its chips."""
    [jobset] = read("jobset-h100.yaml")
    [group] = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    env = {each["name"]: each for each in containers(jobset)[0]["env"]}
    assert int(env["JAX_NUM_PROCESSES"]["value"]) == group["replicas"] * job["parallelism"]
    name = jobset["metadata"]["name"]
    host, port = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert host == f"{name}-{group['name']}-0-0.{name}"
    assert int(port) == containers(jobset)[0]["ports"][0]["containerPort"]
    assert job["completionMode"] == "Indexed" and "job-completion-index" in str(env["JAX_PROCESS_ID"])
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


def test_slurm_starts_as_many_processes_as_gpus():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SHELL["slurm.sbatch"], re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("TERM@"), "SIGTERM before the end, to save"


def test_a_service_of_skypilot_is_probed_where_it_answers():
    [task] = read("skypilot-serve.yaml")
    [words] = own_commands(task["run"])
    understood(words, task["resources"]["ports"])
    assert task["service"]["readiness_probe"]["path"] == "/ready"
    for name, given in ((n, d) for n, d in DOCUMENTS if n.startswith("skypilot")):
        known = {*given.get("envs", ()), *given.get("secrets", ())}
        used = {*re.findall(r"\$\{?(\w+)", f"{given['run']} {given.get('file_mounts', '')}")}
        assert used <= known, name


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile; continued lines are one, comments go."""
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_copies_what_the_package_is_made_of_and_runs_a_command_of_ours(name):
    found = instructions((LAUNCH / name).read_text())
    assert {word for word, _ in found} <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "CMD"}
    assert found[0][0] == "FROM" and found[-1][0] == "CMD"
    sources = [source for word, given in found if word == "COPY" for source in given.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    links = {
        p.resolve().relative_to(ROOT).parts[0] for p in (ROOT / "swiftkv_jax").iterdir() if p.is_symlink()
    }
    needed = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    needed |= {path.split("/")[0] for path in project["project"]["license-files"]} | links
    assert needed | {"pyproject.toml", project["project"]["readme"]} == {*sources}
    [extras] = re.findall(r"'\.\[(.*)\]'", " ".join(given for word, given in found if word == "RUN"))
    assert {*extras.split(",")} == {"serve", name.split(".")[1]} and {*extras.split(",")} <= EXTRAS.keys()
    [port] = [int(given) for word, given in found if word == "EXPOSE"]
    understood(yaml.safe_load(found[-1][1]), port)  # the exec form is JSON
    user = next(i for i, (word, _) in enumerate(found) if word == "USER")
    assert all(word != "RUN" for word, _ in found[user:]), "what serves is not root"


def test_the_readme_names_every_file_and_its_commands_are_ours():
    text = (LAUNCH / "README.md").read_text()
    named = {*re.findall(r"`([\w.-]+\.(?:cuda13|tpu|sbatch|yaml))`", text)}
    assert named == {path.name for path in LAUNCH.iterdir()} - {"README.md"}
    [xpk] = re.findall(r"xpk workload create (.*?)\n\n", text, re.S)
    words = shlex.split(xpk.replace("\\\n", " "))
    given = dict(zip(words[::2], words[1::2], strict=True))
    known = {
        "--cluster",
        "--workload",
        "--tpu-type",
        "--num-slices",
        "--storage",
        "--docker-image",
        "--command",
    }
    assert given.keys() == known  # of `xpk workload create --help`, xpk 1.x
    understood(shlex.split(given["--command"]))


def test_documents_name_files_that_are_here():
    for path in (ROOT / "docs" / "scale.md", ROOT / "README.md"):
        named = re.findall(r"launch/([\w.-]*\w)", path.read_text())
        assert named and all((LAUNCH / name).exists() for name in named), path


def test_launch_files_name_no_machine():
    """No address but this machine's own and that of all interfaces, no account, no home."""
    for path in LAUNCH.iterdir():
        text = path.read_text()
        assert {*re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", text)} <= {"0.0.0.0", "127.0.0.1"}, path
        assert not re.search(r"@(?!300)|gcr\.io|/root|/Users", text), path


def test_a_wrong_flag_in_a_file_is_found():
    with pytest.raises(UsageError, match="--metric-prefix"):
        understood(["swiftkv-serve", "--http", "0.0.0.0:8000", "--insecure", "--metric-prefix", "x"])
    assert list(own_commands('srun a \\\n  swiftkv-train --out "$OUT"\n# swiftkv-train --no\n')) == [
        ["swiftkv-train", "--out", "$OUT"]
    ]
