"""Rules of the code base: imports point down, state is visible, documentation matches the disk."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "swiftkv_jax"
LEVELS = (
    "version common",
    "config",
    "core text audio",
    "checkpoint",
    "distill engine analysis slim tasks",
    "server lm_eval cli __main__",
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names.split()}
ROOT_MODULES = 12
STRANGERS = {("distill", "engine"), ("engine", "distill"), ("analysis", "distill"), ("analysis", "engine")}
HEAVY = ("torch", "flax.nnx", "tokamax", "qwix")
SLOW = {"scipy", "optax", "orbax", "transformers", "datasets", "matplotlib", "jax.experimental.pallas"}
# Data: a student's export carries it for transformers. It runs there alone (SECURITY.md).
CARRIED = LIBRARY / "checkpoint" / "modeling_swiftkv.py"
HOST_ONLY = ("request", "pages", "sequence", "draft", "queue", "scheduler")  # of engine/


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, or nothing."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imports(nodes) -> set[str]:
    """Every `import a.b` as a.b and every `from a import b` as a.b."""
    out = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import of {node.module}: write the whole name"
            out |= {f"{node.module}.{alias.name}" for alias in node.names}
    return out


def at_import_time(module: ast.AST):
    """The nodes that run when a module is imported: all but the bodies of functions."""
    for node in ast.iter_child_nodes(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_import_time(node)


def unit(name: str) -> str:
    """The module or folder directly under swiftkv_jax that a dotted name lies in."""
    return ([*name.split("."), ""])[1]


def module(path: Path) -> str:
    """The dotted name of a file of the library."""
    parts = ("swiftkv_jax", *path.relative_to(LIBRARY).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


@cache
def edges() -> set[tuple[str, str]]:
    """(importing file, imported file) within the library, as dotted names, imports inside functions
    included."""
    files = {module(path): path for path in python_files("swiftkv_jax")}
    del files["swiftkv_jax"]
    out = set()
    for here, path in files.items():
        for name in imports(ast.walk(tree(path))):
            there = next((n for n in (name, name.rpartition(".")[0]) if n in files), None)
            out |= {(here, there)} if there not in (None, here) else set()
    return out


def unit_edges() -> set[tuple[str, str]]:
    return {(unit(a), unit(b)) for a, b in edges() if unit(a) != unit(b)}


def test_every_unit_has_a_level_and_imports_point_down_and_in_no_circle():
    units = {path.relative_to(LIBRARY).parts[0].removesuffix(".py") for path in python_files("swiftkv_jax")}
    assert units - {"__init__"} <= set(LEVEL)
    assert len(list(LIBRARY.glob("*.py"))) <= ROOT_MODULES
    wrong = sorted((a, b) for a, b in unit_edges() if b != "kernels" and LEVEL[a] < LEVEL[b])
    assert not wrong and not unit_edges() & STRANGERS
    graph: dict[str, set[str]] = {}
    for here, there in edges():
        graph.setdefault(here, set()).add(there)
    graphlib.TopologicalSorter(graph).prepare()


def test_the_documented_import_order_is_this():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Import order")[1]
    listed = re.findall(r"^\| \d \| (.+) \|$", text, re.M)
    names = [re.findall(r"\w+", re.sub(r"\(.*?\)", "", one, flags=re.S)) for one in listed]
    assert list(map(sorted, names)) == [sorted(level.split()) for level in LEVELS]


def test_kernels_import_jax_only():
    """Of the library they import only the check that a folder belongs to the user alone."""
    allowed = {"jax", "jaxtyping", "swiftkv_jax", *sys.stdlib_module_names}
    for path in python_files("kernels"):
        names = imports(ast.walk(tree(path)))
        assert {name.split(".")[0] for name in names} <= allowed, path
        own = {n for n in names if n.startswith("swiftkv_jax")} - {"swiftkv_jax.common.folder.private"}
        assert all(n.startswith("swiftkv_jax.kernels") for n in own), path


@pytest.mark.parametrize("heavy", HEAVY)
def test_heavy_packages_are_not_imported_by_importing_the_library(heavy):
    for path in set(python_files("swiftkv_jax", "kernels")) - {CARRIED}:
        names = imports(at_import_time(tree(path)))
        assert not any(f"{name}.".startswith(f"{heavy}.") for name in names), path


def test_a_command_starts_without_packages_that_few_commands_use():
    """Each takes from a tenth of a second to seconds to import."""
    code = "import sys, swiftkv_jax.cli.commands, swiftkv_jax.server.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not SLOW & set(done.stdout.split())


def test_the_code_that_exports_carry_knows_transformers_only_and_nothing_imports_it():
    names = {name.split(".")[0] for name in imports(ast.walk(tree(CARRIED)))}
    assert names - sys.stdlib_module_names == {"torch", "transformers"}
    for path in python_files("swiftkv_jax", "kernels", "tests", "demo", "benchmarks"):
        assert not any(CARRIED.stem in name.split(".") for name in imports(ast.walk(tree(path)))), path


def test_the_schedulers_half_of_the_engine_is_plain_python():
    for path in (LIBRARY / "engine" / f"{name}.py" for name in HOST_ONLY):
        if path.exists():
            assert not {name.split(".")[0] for name in imports(ast.walk(tree(path)))} & {
                "jax",
                "numpy",
                "flax",
            }, path


def test_only_listed_modules_access_the_environment_and_jax_config():
    """The environment and jax.config belong to cli/commands.py and conftest.py; and to what must know
    a machine before JAX has it, and the process that checks it."""
    check = ROOT / "kernels" / "check"
    own = {LIBRARY / "cli" / "commands.py", check / "machine.py", check / "__main__.py"}
    for path in set(python_files("swiftkv_jax", "kernels")) - own:
        used = {dotted(node) for node in ast.walk(tree(path))} | imports(ast.walk(tree(path)))
        hidden = {"os.environ", "os.getenv", "os.putenv", "jax.config", "jax.config.update"}
        assert not used & hidden, path


def test_the_scripts_and_the_installed_commands_are_the_same():
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert installed["swiftkv-eval"] == "swiftkv_jax.cli.commands:evaluate"
    assert installed["swiftkv-convert"] == "swiftkv_jax.cli.commands:convert"
    assert installed["swiftkv"] == "swiftkv_jax.cli.commands:main"
    assert "swiftkv_jax.cli.commands.main" in imports(ast.walk(tree(LIBRARY / "__main__.py")))
    for name in ("train", "serve"):
        assert installed[f"swiftkv-{name}"] == f"swiftkv_jax.cli.commands:{name}"
        assert f"swiftkv_jax.cli.commands.{name}" in imports(ast.walk(tree(ROOT / f"{name}.py")))


def test_only_plans_and_checkpoint_code_ask_for_a_method():
    """Others ask a plan for what they need: a shared norm, rows to fill, layers that are skipped."""
    known = {"config", "checkpoint"}
    for path in python_files("swiftkv_jax", "kernels", "benchmarks", "demo", "configs"):
        own = path.is_relative_to(LIBRARY) and path.relative_to(LIBRARY).parts[0] in known
        if own or path == LIBRARY / "core" / "surgery.py":
            continue
        asked = [n.lineno for n in ast.walk(tree(path)) if getattr(n, "attr", "") == "is_swiftkv"]
        assert not asked, (path, asked)


def test_only_two_functions_access_kernel_weights():
    """Code that runs a model gets products and kernels from `layers`, so that no scale is forgotten."""
    names = ("layers", "rows", "weights", "loop", "scan", "cache")
    files = [LIBRARY / "core" / f"{name}.py" for name in names]
    for path in [*files, *python_files("swiftkv_jax/engine")]:
        allowed = [
            node
            for function in ast.walk(tree(path))
            if isinstance(function, ast.FunctionDef) and function.name in ("linear", "kernel_of")
            for node in ast.walk(function)
        ]
        taken = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Subscript) and n not in allowed]
        wrong = [n.lineno for n in taken if getattr(n.slice, "value", None) == "kernel"]
        assert not wrong, (path, wrong)


def test_no_code_is_loaded_from_data():
    """Nothing pickled, evaluated, or handed to a shell: what is read can only be data (SECURITY.md)."""
    modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "runpy"}
    calls = {"eval", "exec", "os.system", "os.popen"}
    flags = {"shell", "allow_pickle", "trust_remote_code"}
    for path in python_files("swiftkv_jax", "kernels"):
        nodes = list(ast.walk(tree(path)))
        assert not {name.split(".")[0] for name in imports(nodes)} & modules, path
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            assert dotted(call.func) not in calls, (path, call.lineno)
            said = [k for k in call.keywords if k.arg in flags]
            assert all(getattr(k.value, "value", True) is False for k in said), (path, call.lineno)


def only_narrows(test: ast.expr) -> bool:
    """Whether a condition says no more than that something is there, to the type checker."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(map(only_narrows, test.values))
    compared = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
    return compared and len(test.ops) == 1 and ast.unparse(test.comparators[0]) == "None"


def test_no_check_is_an_assert():
    """`python -O` drops them: what must not be is refused by `raise`. A None fails at its use anyway."""
    nodes = [
        (path, n)
        for path in [*python_files("swiftkv_jax", "kernels"), *ROOT.glob("*.py")]
        for n in ast.walk(tree(path))
    ]
    asserts = [(path, n) for path, n in nodes if isinstance(n, ast.Assert)]
    checks = [f"{path.relative_to(ROOT)}:{n.lineno}" for path, n in asserts if not only_narrows(n.test)]
    assert asserts and not checks
    debug = [str(path) for path, n in nodes if isinstance(n, ast.Name) and n.id == "__debug__"]
    assert not debug
