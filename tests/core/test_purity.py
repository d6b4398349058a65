"""The core imports nothing that could make two ranks differ."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import recover.core

CORE = Path(recover.core.__file__).parent
MODULES = [*sorted(CORE.rglob("*.py")), CORE.parent / "errors.py"]
FORBIDDEN = {
    *("asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib"),
    *("random", "secrets", "select", "signal", "socket", "subprocess", "tempfile", "threading"),
    *("time", "uuid", "warnings"),
}
IMPURE_CALLS = {"breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_only_pure_modules_are_imported(path: Path) -> None:
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        top = name.split(".")[0]
        if top == "recover":
            pure = name.startswith("recover.core") or name == "recover.errors"
            assert pure, f"{path.name} imports {name}"
        else:
            assert top in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert top not in FORBIDDEN, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_call_leaves_the_process(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{path.name}:{node.lineno}"


def test_there_is_a_core_to_check() -> None:
    assert {"iteration.py", "guard.py", "schedule.py"} <= {path.name for path in MODULES}
