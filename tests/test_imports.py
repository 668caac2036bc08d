"""The layout's rules: what may import what, who may call a collective, how files are named, opened and sized."""

import ast
import builtins
import dis
import graphlib
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "longstraw_jax", "experiments")

# A file imports only from its own line or from lines above it.
ORDER = (
    ("pallas_kernels",),
    ("longstraw_jax.config", "longstraw_jax.types", "longstraw_jax.fingerprint"),
    ("longstraw_jax.launch", "longstraw_jax.command", "longstraw_jax.interrupt", "longstraw_jax.phases"),
    ("longstraw_jax.sharding",),
    ("longstraw_jax.parallel",),
    ("longstraw_jax.expert_dispatch",),
    ("longstraw_jax.model",),
    ("longstraw_jax.lora",),
    ("longstraw_jax.prefix",),
    (
        "longstraw_jax.forward",
        "longstraw_jax.replay",
        "longstraw_jax.logprob",
        "longstraw_jax.exact_gradient",
        "longstraw_jax.sampling",
        "longstraw_jax.stopping",
    ),
    ("longstraw_jax.rl",),
    ("longstraw_jax.rollout",),
    ("longstraw_jax.train",),
    ("longstraw_jax.io",),
    ("longstraw_jax.tasks",),
    ("longstraw_jax.pretrain",),
    ("longstraw_jax.job_config", "longstraw_jax.progress"),
    ("longstraw_jax.evidence",),
    ("experiments",),
)
COLLECTIVES = {
    *("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_gather_reduced", "all_to_all"),
    *("ragged_all_to_all", "ppermute", "pshuffle", "pbroadcast", "shard_map"),
}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "misc", "registry", "manager"}
MOST_LINES = 600


def sources() -> dict[str, str]:
    """Module name -> source of every file of the three packages."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {module_name(file.relative_to(ROOT)): file.read_text() for file in files}


def module_name(path: pathlib.PurePath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> set[str]:
    """Every module or name that the source imports, wherever in the file; a relative import shows as '.name'."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def line_of(module: str) -> int | None:
    """The longest entry of ORDER that the module lies under decides."""
    under = [
        (len(name), i)
        for i, names in enumerate(ORDER)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    return max(under)[1] if under else None


def import_problems(files: dict[str, str]) -> list[str]:
    """Imports that go up, relative imports, modules without a place, and cycles."""
    problems, graph = [], {}
    for module, source in files.items():
        if line_of(module) is None and module not in PACKAGES:
            problems.append(f"{module} has no place in ORDER")
            continue
        graph[module] = set()
        for target in imported(source):
            if target.startswith("."):
                problems.append(f"{module} imports {target} relatively")
            elif target.split(".")[0] in PACKAGES:
                # `from a.b import c` names a module a.b.c or something in a.b.
                owner = target if target in files else target.rpartition(".")[0]
                graph[module].add(owner)
                here, there = line_of(module), line_of(target)
                if here is not None and there is not None and there > here:
                    problems.append(f"{module} imports {target}, which stands below it")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        problems.append(f"cycle {' -> '.join(error.args[1])}")
    return problems


def collective_calls(source: str) -> set[str]:
    """Collectives that the source takes from jax or jax.lax."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if owner in ("jax", "lax", "jax.lax") or owner.startswith("jax.experimental"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            found |= COLLECTIVES & {alias.name for alias in node.names}
    return found


def undefined(source: str) -> set[str]:
    """Global names that the source uses and nothing in it binds; the linter leaves them out, as shapes in annotations
    look like them to it."""
    used, bound = set(), {*dir(builtins), "__file__", "__annotations__"}
    codes = [compile(source, "source", "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                used.add(step.argval)
            elif step.opname in ("STORE_GLOBAL", "STORE_NAME"):
                bound.add(step.argval)
    return used - bound


def test_every_file_imports_only_what_stands_above_it():
    assert import_problems(sources()) == []


def test_kernels_know_nothing_of_the_package():
    for module, source in sources().items():
        if module.startswith("pallas_kernels"):
            assert not any(name.startswith(("longstraw_jax", "experiments")) for name in imported(source)), (
                module
            )


def test_only_parallel_calls_collectives():
    callers = {module for module, source in sources().items() if collective_calls(source)}
    assert callers == {"longstraw_jax.parallel"}


def test_files_are_named_opened_and_sized_by_the_rules():
    for module, source in sources().items():
        assert VAGUE_NAMES.isdisjoint(module.split(".")), f"{module} says nothing in its name"
        assert ast.get_docstring(ast.parse(source)), f"{module} does not open with its duty"
        lines = source.count("\n")
        assert lines <= MOST_LINES, f"{module} has {lines} lines"


@pytest.mark.parametrize(
    "files, problem",
    [
        ({"longstraw_jax.config": "from longstraw_jax.io import data"}, "stands below"),
        ({"longstraw_jax.config": "def f():\n    import longstraw_jax.train"}, "stands below"),
        ({"pallas_kernels.a.api": "import longstraw_jax.config"}, "stands below"),
        ({"longstraw_jax.rl.masks": "from . import advantages"}, "relatively"),
        ({"longstraw_jax.trainer": ""}, "no place"),
        (
            {
                "longstraw_jax.rl.a": "from longstraw_jax.rl import b",
                "longstraw_jax.rl.b": "from longstraw_jax.rl.a import x",
            },
            "cycle",
        ),
    ],
)
def test_the_import_check_sees(files, problem):
    found = import_problems({"longstraw_jax.io.data": "", "longstraw_jax.train": "", **files})
    assert len(found) == 1 and problem in found[0]


@pytest.mark.parametrize(
    "source",
    ["import jax\njax.lax.psum(x, 'i')", "from jax.lax import ppermute", "from jax import shard_map"],
)
def test_the_collective_check_sees(source):
    assert len(collective_calls(source)) == 1


def test_every_global_name_is_bound():
    tests = {str(file): file.read_text() for file in (ROOT / "tests").glob("*.py")}
    found = {module: undefined(source) for module, source in (sources() | tests).items()}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize("source", ["x = y", "def f():\n    return [y for _ in range(3)]", "class A:\n    b: y = 1"])
def test_the_check_of_names_sees(source):
    assert undefined(source) == {"y"}


def test_every_name_taken_from_a_module_of_ours_is_there():
    """`module.name` of an imported module of the three packages; a linter does not look into other files."""
    ours, missing = sources(), []
    for name, source in ours.items():
        tree, modules = ast.parse(source), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in ours:
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                modules |= {a.asname or a.name: a.name for a in node.names if a.name in ours and "." not in a.name}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assigned |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            module = modules.get(node.value.id)
            if module and node.value.id not in assigned and not hasattr(importlib.import_module(module), node.attr):
                missing.append(f"{name}: {module}.{node.attr}")
    assert missing == []
