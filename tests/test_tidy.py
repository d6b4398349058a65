"""Structure rules that only ratchet down: import directions, sizes, and words we do not use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "recover"

# What each package may import, besides itself and recover.errors. One direction only.
ALLOWED = {
    "core": set(),
    "sim": {"core"},
    "records": {"core"},
    "report": {"records"},
    "mpi": {"core"},
    "launch": {"core", "mpi", "faults"},
    "tensors": {"core", "mpi"},
    "parallel": {"core", "mpi", "tensors"},
    "train": {"core", "mpi", "launch", "tensors", "parallel", "records", "faults"},
    "adapters": {"core", "launch", "mpi", "tensors", "parallel", "train", "records"},
    "evaluation": {"core", "launch", "mpi", "records", "train", "faults"},
}
OUTSIDE = {"numpy", "torch", "mpi4py", "yaml", "rich", "typer"}
OUTSIDE_ALLOWED = {
    "core": set(),
    "sim": set(),
    "records": {"yaml"},
    "report": set(),
    "mpi": {"mpi4py"},
    "launch": set(),
    "tensors": {"torch"},
    "parallel": {"torch"},
    "train": {"torch", "numpy", "yaml", "rich"},
    "adapters": {"torch"},
    "evaluation": {"torch", "rich"},
}
LONGEST_FILE = 400
LONGEST_FUNCTION = {"core": 50, "sim": 50}
LONGEST_FUNCTION_ELSEWHERE = 70
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|manager|base)(_|$)")


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else file.stem


def imported(file: Path) -> Iterator[str]:
    """Yield the dotted names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "recover":
                yield from (f"recover.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("file", source_files(), ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_point_one_way(file: Path) -> None:
    package = package_of(file)
    if package not in ALLOWED:
        pytest.skip("a top-level module")
    reached = {name.split(".")[1] for name in imported(file) if name.startswith("recover.")}
    assert reached <= ALLOWED[package] | {package, "errors"} | user_surface(file)
    outside = {name.split(".")[0] for name in imported(file)} & OUTSIDE
    if file.name in ("process_group.py", "work.py"):
        outside -= {"torch"}  # they give the transport the face of torch
    assert outside <= OUTSIDE_ALLOWED[package]


def user_surface(file: Path) -> set[str]:
    """The reference trainer and the adapters are written as a user would write them."""
    written_so = file.name == "reference.py" or package_of(file) == "adapters"
    return {"Trainer", "init"} if written_so else set()


@pytest.mark.parametrize("file", source_files(), ids=lambda f: str(f.relative_to(SOURCE)))
def test_sizes(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST_FILE
    limit = LONGEST_FUNCTION.get(package_of(file), LONGEST_FUNCTION_ELSEWHERE)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= limit, f"{node.name} has {length} lines"


@pytest.mark.parametrize("file", source_files(), ids=lambda f: str(f.relative_to(SOURCE)))
def test_every_module_says_what_it_is(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, "a module opens with what it is"
    assert not FORBIDDEN_NAMES.search(file.stem), "a name that says nothing"


def test_the_core_is_pure() -> None:
    banned = {"os", "time", "random", "threading", "logging", "socket", "subprocess", "asyncio"}
    for file in (SOURCE / "core").rglob("*.py"):
        tops = {name.split(".")[0] for name in imported(file)}
        assert not tops & banned, f"{file.name} imports {tops & banned}"


def test_mpi4py_has_one_home() -> None:
    for file in source_files():
        if any(name.split(".")[0] == "mpi4py" for name in imported(file)):
            assert package_of(file) == "mpi", file
