"""The line is straight: modules import only what comes before them. Public names are pinned, none prints."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lopsided

ROOT = Path(lopsided.__file__).parent

# The floor plan: every package imports only from packages before it.
ORDER = (
    "interrupts",
    "errors",
    "codec",
    "models",
    "cluster",
    "ir",
    "capturing",
    "ops",
    "schedule",
    "planner",
    "calibration",
    "comm",
    "executor",
    "profiling",
    "runtime",
    "integrations",
    "verification",
    "report",
    "demo",
    "cli",
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT) != Path("__init__.py")
}
# Starts the command line.
ENDS = ("__main__",)


def room(module: str) -> int:
    """The place in the line of a module's package."""
    name = module.split(".")[0]
    if name in ORDER:
        return ORDER.index(name)
    raise AssertionError(f"lopsided.{module} has no place in the line: add its package to ORDER")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            base = node.module or ""
            # `from lopsided import zoo` imports a module, `from lopsided.models.zoo import SMALL` a name of one.
            found.update(
                f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix("lopsided.") in MODULES else base
                for alias in node.names
            )
    return {name.removeprefix("lopsided.") for name in found if name.startswith("lopsided.")}


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ENDS])
def test_imports_look_upstream(module: str) -> None:
    for name in imported(MODULES[module]):
        same = name.split(".")[0] == module.split(".")[0]
        assert room(name) < room(module) or same, f"lopsided.{module} imports lopsided.{name}, which comes after it"


def test_every_place_in_the_line_is_taken() -> None:
    heads = {name.split(".")[0] for name in MODULES}
    assert [name for name in ORDER if name not in heads] == []


def test_the_imports_of_the_package_itself_are_public_names() -> None:
    for name in lopsided.__all__:
        assert hasattr(lopsided, name)


def test_public_names() -> None:
    assert lopsided.__all__ == [
        "Checkpoints",
        "Cluster",
        "Graph",
        "LopsidedError",
        "Parallel",
        "Placement",
        "Plan",
        "Program",
        "RuleBook",
        "Shares",
        "Simulation",
        "Verification",
        "capture",
        "check_program",
        "clip_grad_norm_",
        "derive_rules",
        "full_state_dict",
        "gather",
        "load_checkpoint",
        "load_cluster",
        "load_full_state_dict",
        "load_plan",
        "one_device",
        "parallelize",
        "parse_graph",
        "parse_program",
        "plan",
        "random_program",
        "save_checkpoint",
        "save_plan",
        "shard",
        "simulate",
        "verify",
        "whole",
    ]


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_no_module_has_the_name_of_a_public_function() -> None:
    """`lopsided.plan` is a function: no module or package of that name may stand behind it."""
    lasts = {module.split(".")[-1] for module in MODULES}
    assert [name for name in lopsided.__all__ if name in lasts] == []


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("cli.app", *ENDS)])
def test_libraries_do_not_print(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "sys.stdout.write", "sys.stderr.write"), (
                f"lopsided.{module}:{node.lineno} prints"
            )


@pytest.mark.parametrize("module", MODULES)
def test_no_bare_asserts(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        assert not isinstance(node, ast.Assert), (
            f"lopsided.{module}:{node.lineno} asserts; raise an error that says what to do"
        )


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text())), f"lopsided.{module} has no docstring"


def test_every_refusal_says_what_to_do() -> None:
    """Errors raised in the library carry `do=`, or hand another error's on."""
    names = {
        "CaptureError",
        "ClusterError",
        "DoesNotFitError",
        "GraphError",
        "InputError",
        "ModelError",
        "NotationError",
        "PlanError",
        "ProgramError",
        "RuleError",
        "SharesError",
    }
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                given = {keyword.arg for keyword in node.keywords}
                assert "do" in given or None in given, f"lopsided.{module}:{node.lineno}: {node.func.id} without do="
