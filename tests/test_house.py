"""The rules of the house: imports point one way, rooms stay small, configs are valid, nothing names a machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.config.compose import compose
from k3train.config.exit_codes import ExitCode
from k3train.config.load import load
from k3train.experiment import Experiment
from k3train.models.config import ModelConfig
from k3train.models.rules import model_faults

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "k3train").rglob("*.py"))
# A room imports only from its own rank and below, and rooms of one rank do not import each other in a circle.
RANKS = {
    "config": 0, "parallel": 1, "kernels": 1, "models": 2, "optim": 2, "data": 2, "checkpoint": 2, "metrics": 2,
    "experiment": 3, "train": 3, "infer": 3, "convert": 3, "run": 3, "cli": 4, "__main__": 5,
}  # fmt: skip
FILE_LINES, FUNCTION_LINES = 400, 60
# Longer on purpose: {"k3train/room/file.py": "reason"}, {"k3train/room/file.py:function": "reason"}.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
# A JAX-free file besides every config.py, experiment.py and the whole of config/ and cli/.
JAX_FREE = ["k3train.models.counts", "k3train.models.rules", "k3train.models.stored"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> list[tuple[str, int]]:
    """Modules of k3train that a file imports anywhere in it, with the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_room = node.module == "k3train"
            found += [(f"k3train.{alias.name}" if is_room else node.module, node.lineno) for alias in node.names]
    return [
        (module, line)
        for module, line in found
        if module.split(".")[0] == "k3train" and module != "k3train.__version__"
    ]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_imports_point_one_way():
    wrong, edges = [], set()
    for path in SOURCES:
        here = room(module_of(path))
        for module, line in imports(path):
            there = room(module)
            if not there or there == here:
                continue
            edges.add((here, there))
            if RANKS[there] > RANKS[here]:
                wrong.append(f"{name_of(path)}:{line} imports {module}")
            if here == "kernels" and there != "config":
                wrong.append(f"{name_of(path)}:{line} imports {module}; kernels stand alone")
            if here == "experiment" and there != "config" and module.split(".")[-1] not in ("config", "rules"):
                wrong.append(f"{name_of(path)}:{line} imports {module}; it may import sections only")
    assert not wrong, "\n".join(wrong)
    both = sorted((a, b) for a, b in edges if (b, a) in edges and a < b and "experiment" not in (a, b))
    # Sections may name each other's types; code may not.
    assert not both, f"rooms that import each other: {both}"


def test_config_files_are_free_of_jax():
    modules = [module_of(p) for p in SOURCES if p.name == "config.py" or p.parent.name == "config"]
    modules += ["k3train.experiment", "k3train.cli.main", *JAX_FREE]
    code = "import importlib, sys\n" + "\n".join(
        f"importlib.import_module({m!r}); assert 'jax' not in sys.modules, {m!r}" for m in modules
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_package_inits_are_empty():
    full = [
        name_of(p)
        for p in SOURCES
        if p.name == "__init__.py" and p.read_text().strip() and p.parent != ROOT / "k3train"
    ]
    assert not full


def test_every_folder_is_a_package():
    folders = {p.parent for p in SOURCES}
    assert not [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring (shapes, sources) left out."""
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


def test_files_and_functions_stay_small():
    long = {}
    for path in SOURCES:
        text = path.read_text()
        if len(text.splitlines()) > FILE_LINES:
            long[name_of(path)] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > FUNCTION_LINES:
                long[f"{name_of(path)}:{node.name}"] = code_lines(node)
    excused = set(LONG_FILES) | set(LONG_FUNCTIONS)
    assert not {key: lines for key, lines in long.items() if key not in excused}
    assert excused <= set(long), "an exception that is no longer needed"


def test_modules_say_what_they_do():
    silent = [
        name_of(p) for p in SOURCES if p.name != "__init__.py" and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent


@pytest.mark.parametrize("path", sorted((ROOT / "configs/experiments").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_experiments_are_valid(path):
    load(path, [], Experiment)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/model").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_models_are_valid(path):
    model = ModelConfig.model_validate(compose(path).plain()["model"])
    assert list(model_faults(model)) == []


def committed_text() -> list[Path]:
    """Tracked and new files that are text, tests' reference numbers left out."""
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listing.stdout.splitlines()]
    return [p for p in paths if p.is_file() and p.suffix not in (".npz", ".safetensors", ".png")]


def test_nothing_names_a_machine_or_a_package_host():
    # Spelled in pieces, so that this file does not hold what it looks for.
    pattern = re.compile(
        "|".join(
            [
                "/wo" + "rk/",
                "/ro" + r"ot/",
                "/ho" + r"me/\w",
                "pyp" + r"i\.org",
                "python" + "hosted",
                "registry" + r"\.npmjs",
                "deb" + r"\.debian",
            ]
        )
    )
    found = []
    for path in committed_text():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(path)}:{i}" for i, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert not found, found


def test_exit_codes_are_documented():
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: code.value for code in ExitCode}


def test_ci_calls_the_readmes_test_command():
    script = (ROOT / ".ci/run").read_text()
    commands = [line for line in script.splitlines() if line and not line.startswith("#")]
    targets = "export K3TRAIN_TEST_TARGETS=install"
    assert commands == ["set -e", 'cd "$(dirname "$0")/.."', targets, "exec scripts/k3train test"]
    assert "    scripts/k3train test\n" in (ROOT / "README.md").read_text()
