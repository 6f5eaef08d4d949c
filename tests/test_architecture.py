"""The structure of the code, checked on its syntax trees.

Which room may import which, how long functions and files may be, how many parameters a function
may take, how many files are in a folder, what must not be in them, and what stands at the top of
the repository. Every rule is first tried on small bad snippets.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = {
    *("README.md", "Makefile", "pyproject.toml", ".gitignore", ".ci"),
    *("streamer", "kernels", "web", "tests", "loadtest", "docs"),
    # Where code hosts look for them: they link each beside the code, and SECURITY.md from the form
    # for private reports.
    *("LICENSE", "CONTRIBUTING.md", "SECURITY.md"),
}
FUNCTION_LINES, KERNEL_LINES, FILE_LINES = 59, 149, 600
PARAMETERS = 6
FOLDER_FILES = 15
ANY = frozenset(["*"])
OUTSIDE_WORLD = "asyncio threading time logging random datetime secrets socket queue signal"
OUTSIDE_WORLD += " multiprocessing concurrent selectors sched subprocess torch numpy"


class Room(NamedTuple):
    """What a room may import: rooms and packages at module level, more of them inside functions.

    The stdlib and msgspec are free unless in `never`; errors, config, handshake and spelling are
    open to every room.
    """

    rooms: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    lazy_rooms: frozenset[str] = frozenset()
    lazy_packages: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def _room(rooms: str = "", packages: str = "", **more: str | frozenset[str]) -> Room:
    sets = {k: v if isinstance(v, frozenset) else frozenset(v.split()) for k, v in more.items()}
    return Room(frozenset(rooms.split()), frozenset(packages.split()), **sets)


# Rooms that wire others together import them inside functions; the pure core's values are free.
# No room imports these five at module level.
LAZY = frozenset(["build", "inside", "cli", "demo", "replicas"])
ROOMS = {
    "errors": _room(),
    "config": _room(),
    "handshake": _room(),
    "spelling": _room(),
    "tokenizer": _room("", "tokenizers jinja2", lazy_packages="transformers regex", never="torch"),
    "core": _room("", never=OUTSIDE_WORLD),
    "constraints": _room("core", "numpy", lazy_packages="llguidance"),
    "model": _room(
        "kernels core constraints tokenizer",
        "torch transformers safetensors numpy regex rich",
        never="asyncio streamer.engine streamer.server",
    ),
    "engine": _room("core constraints tokenizer", lazy_rooms="build", never="torch"),
    "server": _room(
        "engine tokenizer core constraints",
        "starlette uvicorn httptools prometheus_client websockets",
        lazy_packages="opentelemetry",
        never="torch streamer.model streamer.core.scheduler streamer.core.blocks streamer.core.kv"
        " streamer.constraints.grammars streamer.constraints.masks",
    ),
    "kernels": _room("", "torch triton numba numpy"),
    "loadtest": _room("", "*"),
    "build": _room("core", "", lazy_rooms=ANY, lazy_packages=ANY),
    "cli": _room("core", "", lazy_rooms=ANY, lazy_packages=ANY),
    "replicas": _room(
        "core engine tokenizer",
        "",
        lazy_rooms=ANY,
        lazy_packages=ANY,
        never="torch streamer.model",
    ),
    "fake": _room("core tokenizer", lazy_rooms="engine", lazy_packages="tokenizers"),
    "inside": _room("core loadtest", "*", lazy_rooms=ANY),
    "demo": _room("core", "*", lazy_rooms=ANY),
    "llm": _room("core", "", lazy_rooms="build engine", lazy_packages="rich"),
    "package": _room("", "", lazy_rooms=ANY),
}
# What a folder of the server may import of the rest of the server, at any level.
SERVER_FOLDERS = {
    "openai": frozenset(["errors", "parsing", "transport.frames"]),  # pure: no connection
    "parsing": frozenset[str](),
    "transport": frozenset(["errors", "service"]),
    "telemetry": frozenset[str](),
}
OPEN_ROOMS = frozenset(["errors", "config", "handshake", "spelling", "package"])
# Programs of their own, which use the public names as any user's program would.
USERS = frozenset(["streamer.loadtest.compare.peers.run_streamer"])
OPEN_PACKAGES = frozenset(["msgspec", *sys.stdlib_module_names])


class Import(NamedTuple):
    """One imported name, absolute. `is_lazy`: in a function or under TYPE_CHECKING."""

    name: str
    line: int
    is_lazy: bool


def imports_of(tree: ast.Module, module: str) -> Iterator[Import]:
    """Every import in a module that is called `module` (a package's is `pkg.__init__`)."""

    def walk(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(a.name, child.lineno, is_lazy) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    base = ".".join([*module.split(".")[: -child.level], *filter(None, [base])])
                yield from (Import(f"{base}.{a.name}", child.lineno, is_lazy) for a in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(child, True)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, is_lazy or is_function)

    yield from walk(tree, False)


def room_of(name: str) -> str:
    """The room of a dotted name below `streamer`."""
    parts = name.split(".")
    room = parts[1] if len(parts) > 1 else "package"
    if room == "__main__":
        return "cli"
    if room == "loadtest" and len(parts) > 2 and parts[2] in ("inside", "paper"):
        return "inside"  # measures the engine from within, so it may import it
    return room if room in ROOMS else "package"


def _begins(name: str, prefixes: frozenset[str]) -> str | None:
    return next((p for p in prefixes if name == p or name.startswith(p + ".")), None)


def import_faults(tree: ast.Module, module: str) -> Iterator[str]:
    """Imports that the table does not allow."""
    here = room_of(module)
    rule = ROOMS[here]
    for name, line, is_lazy in imports_of(tree, module):
        top = name.split(".")[0]
        if forbidden := _begins(name, rule.never):
            yield f"{module}:{line}: {here} never imports {forbidden}"
        elif top == "streamer":
            there = room_of(name)
            if there == "package" and module in USERS:
                continue
            if there == "package" and here != "package" and name != "streamer.__version__":
                yield f"{module}:{line}: {name} is no room; the public names are for users"
                continue
            allowed = rule.rooms | OPEN_ROOMS | {here} | (rule.lazy_rooms if is_lazy else set())
            if there not in allowed and "*" not in allowed:
                yield f"{module}:{line}: {here} imports {name}"
            elif there in LAZY and there != here and not is_lazy:
                yield f"{module}:{line}: {name} may only be imported inside a function"
            backend = _begins(name, frozenset(["streamer.kernels.gpu", "streamer.kernels.cpu"]))
            if backend and not module.startswith(backend) and not is_lazy:
                yield f"{module}:{line}: {backend} is imported on first use"
        elif top in ("kernels", "web", "tests", "loadtest"):
            yield f"{module}:{line}: {top} is installed as streamer.{top}"
        elif top not in OPEN_PACKAGES:
            allowed = rule.packages | (rule.lazy_packages if is_lazy else set())
            if top not in allowed and "*" not in allowed:
                yield f"{module}:{line}: {here} imports {top}"


def folder_faults(tree: ast.Module, module: str) -> Iterator[str]:
    """Imports of one folder of the server from the rest of it."""
    server = "streamer.server."
    here = module.removeprefix(server).split(".")[0]
    if not module.startswith(server) or here not in SERVER_FOLDERS:
        return
    allowed = frozenset(server + name for name in (here, *SERVER_FOLDERS[here]))
    for name, line, _ in imports_of(tree, module):
        if name.startswith(server) and not _begins(name, allowed):
            yield f"{module}:{line}: server/{here} imports {name}"


def size_faults(source: str, tree: ast.Module, module: str) -> Iterator[str]:
    """Files and functions that are too long."""
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield f"{module}: {lines} lines, the limit is {FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            limit = KERNEL_LINES if is_kernel else FUNCTION_LINES
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                yield f"{module}:{node.lineno}: {node.name} has {lines} lines, limit {limit}"


def parameter_faults(tree: ast.Module, module: str) -> Iterator[str]:
    """Functions with too many parameters, self not counted: what belongs together is a value.

    Kernels are exempt: they have the signatures of the C and Triton functions that they launch.
    """
    if room_of(module) == "kernels":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) - (names[:1] in (["self"], ["cls"])) + len(node.args.kwonlyargs)
            if count > PARAMETERS:
                yield f"{module}:{node.lineno}: {node.name} takes {count}, limit {PARAMETERS}"


def crowded_folders(paths: Iterable[Path]) -> Iterator[str]:
    """Folders with too many source files, __init__.py not counted."""
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    for folder, count in counts.items():
        if count > FOLDER_FILES:
            yield f"{folder}: {count} files, the limit is {FOLDER_FILES}"


def contract_faults(tree: ast.Module, module: str) -> Iterator[str]:
    """A module docstring says what the module owns; two lines or more, but in package files."""
    doc = ast.get_docstring(tree)
    if not doc:
        yield f"{module}: no contract"
    elif len(doc.split("\n")) < 2 and module.split(".")[-1] not in ("__init__", "__main__"):
        yield f"{module}: its contract is one line"


PRINTING = {"print", "builtins.print", "sys.stdout.write", "sys.stderr.write"}
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter"}


def habit_faults(tree: ast.Module, module: str) -> Iterator[str]:
    """print, assert, global, and mutable values in module-level variables."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assert):
            yield f"{module}:{line}: assert"
        elif isinstance(node, ast.Global):
            yield f"{module}:{line}: global"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTING:
            yield f"{module}:{line}: print"
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
            and room_of(module) != "cli"
            and module != "streamer.__init__"
        ):
            yield f"{module}:{line}: an import that no table can see"
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            is_mutable = isinstance(value, ast.List | ast.Dict | ast.Set) or (
                isinstance(value, ast.Call) and ast.unparse(value.func) in MUTABLE_CALLS
            )
            for target in targets:
                name = ast.unparse(target)
                if is_mutable and not name.isupper() and not name.startswith("__"):
                    yield f"{module}:{node.lineno}: {name} is a mutable module-level variable"


def sources(*folders: str) -> list[Path]:
    """Tracked and new Python files below these folders (links are seen where they point)."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
        and "node_modules" not in str(path)
    ]


def module_of(path: Path) -> str:
    """The dotted name under which a file is installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] in ("streamer", "tests") else ("streamer", *parts))


PRODUCT = sources("streamer", "kernels", "loadtest")
TESTS = sources("tests")


@pytest.mark.parametrize("path", PRODUCT, ids=module_of)
def test_product_module(path: Path) -> None:
    source, module = path.read_text(encoding="utf-8"), module_of(path)
    tree = ast.parse(source)
    faults = [
        *import_faults(tree, module),
        *folder_faults(tree, module),
        *size_faults(source, tree, module),
        *parameter_faults(tree, module),
        *contract_faults(tree, module),
        *habit_faults(tree, module),
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", TESTS, ids=module_of)
def test_test_module(path: Path) -> None:
    source, module = path.read_text(encoding="utf-8"), module_of(path)
    faults = list(size_faults(source, ast.parse(source), module))
    assert not faults, "\n".join(faults)


def test_the_rooms_are_there() -> None:
    """An empty or misplaced tree must not pass, nor a room without a line in the table."""
    strange = {m for m in map(module_of, PRODUCT) if room_of(m) == "package"}
    assert strange == {"streamer.__init__"}
    rooms = {room_of(module_of(path)) for path in PRODUCT}
    assert {"core", "model", "engine", "server", "kernels", "cli", "fake", "demo"} <= rooms
    assert any("core" in path.parts for path in TESTS)


def test_no_folder_is_crowded() -> None:
    assert list(crowded_folders(PRODUCT)) == []
    names = [f"{letter}.py" for letter in "abcdefghijklmno"]
    assert not list(crowded_folders(Path("here", name) for name in [*names, "__init__.py"]))
    assert list(crowded_folders(Path("here", name) for name in [*names, "p.py"]))


def test_no_module_imports_itself_through_others() -> None:
    """No cycles: imports inside functions and under TYPE_CHECKING count too."""
    names = {module_of(path).removesuffix(".__init__"): path for path in PRODUCT}
    graph = {
        name: {
            found
            for one in imports_of(ast.parse(path.read_text(encoding="utf-8")), module_of(path))
            if (found := one.name if one.name in names else one.name.rpartition(".")[0]) in names
            and found != name
        }
        for name, path in names.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


def test_top_of_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {line.split("/")[0] for line in listed} <= TOP
    assert {"README.md", "LICENSE", "Makefile", "CONTRIBUTING.md", "pyproject.toml"} <= {*listed}


TORCH_FREE = "tokenizer core.scheduler engine.engine server.lifecycle fake.model build cli.serve"


@pytest.mark.parametrize("module", [f"streamer.{name}" for name in TORCH_FREE.split()])
def test_torch_is_not_loaded(module: str) -> None:
    """What the table says of the source holds for the process, dependencies included."""
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"{module} loads torch"


BAD_IMPORTS = [
    ("streamer.core.kv", "import time"),
    ("streamer.core.kv", "def f():\n    import torch"),
    ("streamer.core.kv", "from streamer.engine.engine import AsyncEngine"),
    ("streamer.core.kv", "from ..engine import engine"),
    ("streamer.core.kv", "from streamer import AsyncEngine"),
    ("streamer.core.kv", "def f():\n    from streamer.newroom.part import thing"),
    ("streamer.core.__init__", "from ..model import runner"),
    ("streamer.errors", "from streamer.core.plan import Plan"),
    ("streamer.tokenizer.tokenizer", "import transformers"),
    ("streamer.tokenizer.tokenizer", "def f():\n    import torch"),
    ("streamer.model.runner.cpu", "def f():\n    import asyncio"),
    ("streamer.model.runner.cpu", "from streamer.server import app"),
    ("streamer.engine.core", "def f():\n    import torch"),
    ("streamer.engine.core", "from streamer.build import loaders"),
    (
        "streamer.engine.core",
        "if TYPE_CHECKING:\n    from streamer.model.runner.cpu import CpuRunner",
    ),
    ("streamer.server.app", "from streamer.core.scheduler import Scheduler"),
    ("streamer.server.app", "from streamer.core import kv"),
    ("streamer.server.app", "import rich"),
    ("streamer.cli.serve", "from streamer.server.app import build_app"),
    ("streamer.cli.serve", "import rich"),
    ("streamer.server.app", "from streamer.loadtest.inside import step"),
    ("streamer.kernels.ops", "from streamer.core.plan import Plan"),
    ("streamer.kernels.ops", "from streamer.kernels.gpu import attention"),
    ("streamer.model.runner.cpu", "import kernels"),
    ("streamer.loadtest.users", "import streamer.engine"),
    ("streamer.loadtest.users", "from streamer import LLM"),
    ("streamer.loadtest.compare.peers.run_streamer", "from streamer.engine import engine"),
]
GOOD_IMPORTS = [
    (
        "streamer.core.kv",
        "import heapq\nimport msgspec\nfrom streamer.core.blocks import BlockPool",
    ),
    ("streamer.tokenizer.tokenizer", "def f():\n    from transformers import AutoTokenizer"),
    ("streamer.engine.engine", "def f():\n    from streamer.build import loaders"),
    ("streamer.server.app", "from starlette.routing import Route\nfrom ..engine import engine"),
    ("streamer.cli.serve", "async def f():\n    from streamer.server.lifecycle import serve"),
    ("streamer.cli.serve", "if TYPE_CHECKING:\n    from rich.console import Console"),
    ("streamer.kernels.ops", "def f():\n    from streamer.kernels.gpu import attention"),
    ("streamer.loadtest.users", "import locust\nfrom streamer.loadtest import slo"),
    ("streamer.loadtest.compare.peers.run_streamer", "from streamer import LLM, SamplingParams"),
]


@pytest.mark.parametrize(("module", "source"), BAD_IMPORTS)
def test_a_bad_import_is_found(module: str, source: str) -> None:
    assert len(list(import_faults(ast.parse(source), module))) == 1


@pytest.mark.parametrize(("module", "source"), GOOD_IMPORTS)
def test_a_good_import_passes(module: str, source: str) -> None:
    assert list(import_faults(ast.parse(source), module)) == []


@pytest.mark.parametrize(
    ("module", "name", "is_fault"),
    [
        ("openai.chat", "transport.frames", False),
        ("openai.chat", "transport.sse", True),
        ("openai.chat", "responses.body", True),
        ("transport.websocket", "transport.stuck", False),
        ("transport.websocket", "responses.lanes", True),
        ("transport.http", "errors", False),
        ("transport.http", "openai.common", True),
        ("telemetry.logs", "transport.sse", True),
        ("responses.lanes", "transport.follow", False),
    ],
)
def test_folders_of_the_server(module: str, name: str, is_fault: bool) -> None:
    tree = ast.parse(f"def f():\n    from streamer.server.{name} import x")
    assert bool(list(folder_faults(tree, f"streamer.server.{module}"))) is is_fault


@pytest.mark.parametrize(
    ("decorator", "lines", "is_fault"),
    [("", 59, False), ("", 60, True), ("@triton.jit\n", 149, False), ("@njit(x)\n", 150, True)],
)
def test_function_length(decorator: str, lines: int, is_fault: bool) -> None:
    source = decorator + "def f():\n" + "    x = 1\n" * (lines - 1)
    assert bool(list(size_faults(source, ast.parse(source), "m"))) is is_fault


@pytest.mark.parametrize(
    ("parameters", "is_fault"),
    [
        ("a, b, c, d, e, f", False),
        ("self, a, b, /, c, *, d, e, f", False),
        ("a, b, c, d, e, f, *more, **rest", False),
        ("a, b, c, d, e, f, g", True),
        ("cls, a, b, /, c, d, *, e, f, g", True),
    ],
)
def test_number_of_parameters(parameters: str, is_fault: bool) -> None:
    tree = ast.parse(f"class A:\n    async def f({parameters}): ...")
    assert bool(list(parameter_faults(tree, "streamer.core.kv"))) is is_fault
    assert not list(parameter_faults(tree, "streamer.kernels.ops"))


def test_file_length() -> None:
    assert not list(size_faults("x = 1\n" * 600, ast.parse("x = 1"), "m"))
    assert list(size_faults("x = 1\n" * 601, ast.parse("x = 1"), "m"))


@pytest.mark.parametrize(
    "source",
    [
        "assert x",
        "def f():\n    print(1)",
        "sys.stdout.write('x')",
        "importlib.import_module('torch')",
        "def f():\n    global x",
        "seen = []",
        "_cache = dict()",
    ],
)
def test_a_bad_habit_is_found(source: str) -> None:
    assert len(list(habit_faults(ast.parse(source), "m"))) == 1


def test_good_habits_pass() -> None:
    source = "__all__ = ['a']\nTABLE = {}\nAlias = dict[str, int]\nconsole.print(1)"
    assert list(habit_faults(ast.parse(source), "m")) == []


def test_a_contract_is_needed() -> None:
    assert list(contract_faults(ast.parse("x = 1"), "streamer.a"))
    assert list(contract_faults(ast.parse('"""One line."""'), "streamer.a"))
    assert not list(contract_faults(ast.parse('"""One line."""'), "streamer.a.__init__"))
    assert not list(contract_faults(ast.parse('"""Two.\n\nLines."""'), "streamer.a"))
