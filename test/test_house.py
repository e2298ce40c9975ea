"""The house: which module may import which, how large things get, and that ruff has nothing to say. Reads sources."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "liger_cutedsl"
FOLDERS = {PACKAGE: ROOT / "src" / PACKAGE, "benchmark": ROOT / "benchmark"}

# Top-down: a module imports what stands on lower lines, never what stands on higher ones. Modules on one line may
# import each other, though not in a circle. A folder's name is its __init__.py, `(root)` the package's; a star is for
# whatever else a folder holds.
LAYERS = """
__main__
(root)
testing ahead_of_time self_check
kernel_variants
liger.switch
liger.operators liger.dispatch
liger.scaled liger.trl
liger.drop_in
liger
api_explain
api api_log_probs api_row_loss
entering row_check
torch_compile torch_compile_log_probs
custom_ops
dtensor
autograd
upstream row_tensors first_call
derivatives
routing
schedules
schedules.*
split
rounds
shards
engines
engines.cute_engine engines.torch_engine
engines.cute_kernels engines.cute_pairs engines.torch_pairs
engines.cute_operands
engines.cute_moments engines.cute_bytes
engines.cute_ops engines.architectures engines.engine
kernel_cache
rows
objectives
cross_entropy log_probs row_loss
objective
row_statistics
epilogues two_part_sum
epilogue_identity
triton_dx triton_dx_summed triton_pairs triton_sampling
gemm
triton_kernels triton_folds
elementwise
replaced
tiling
without_data checks
call
route options row_function
captured checkpointing weight_grad_buffer
readable saved_state sampling
versions user_warnings
compat
"""

# What is imported inside functions, and why it must not come with the package. Nothing else is.
LATE = {
    "engines.cute_engine": "it imports quack and CuTe DSL, which take seconds and are not everywhere",
    "triton_kernels": "it imports triton, which is not everywhere",
    "liger.dispatch": "it imports Liger-Kernel, which is not everywhere",
    "liger.operators": "it imports Liger-Kernel's other operators, where they run",
}

FOREIGN = ("torch", "liger_kernel", "quack", "triton", "cutlass")
NAMED_TUPLES = ("_replace", "_fields", "_asdict", "_make")  # public, in spite of their names
MODULE_LINES, FUNCTION_LINES = 300, 45


@dataclass(frozen=True)
class Import:
    """Module `importer` imports module `imported` of the same package, in a line; late: inside a function; brought:
    because the folder of another that it names imports it."""

    importer: str
    imported: str
    line: int
    late: bool
    brought: bool = False

    def __str__(self):
        return f"{self.importer} (line {self.line}) imports {self.imported}"


def name_of(path: Path, folder: Path) -> str:
    """liger/switch.py → liger.switch; liger/__init__.py → liger; the package's own __init__.py → (root)."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "(root)"


@cache
def sources(package: str) -> dict[str, str]:
    """Module name → source."""
    folder = FOLDERS[package]
    return {name_of(path, folder): path.read_text() for path in sorted(folder.rglob("*.py"))}


def walk(node: ast.AST, late=False):
    """Every node below, and whether it lies in a function."""
    for child in ast.iter_child_nodes(node):
        yield child, late
        yield from walk(child, late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def imported_names(node: ast.AST) -> list[str]:
    """The full names that a statement imports, or a call of importlib.import_module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        return [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    return []


def imports(package: str, modules: dict[str, str]) -> list[Import]:
    """Every import among a package's modules, for type checkers too. A folder that is reached from outside brings along
    what its __init__.py imports; the package's own, which does so everywhere, is left out."""
    found = []
    for importer, source in modules.items():
        for node, late in walk(ast.parse(source)):
            for name in imported_names(node):
                top, _, inner = name.partition(".")
                while inner and inner not in modules:  # a name in a module
                    inner = inner.rpartition(".")[0]
                if top == package:
                    found.append(Import(importer, inner or "(root)", node.lineno, late))
    for one in list(found):
        folder = one.imported.rpartition(".")[0]
        if folder and not f"{one.importer}.".startswith(f"{folder}."):
            brought = {other.imported for other in found if other.importer == folder and not other.late}
            found += [Import(one.importer, name, one.line, one.late, True) for name in sorted(brought - {one.imported})]
    return [one for one in found if one.importer != one.imported]


def circle(found: list[Import]) -> list[str]:
    """The modules of a circle, the first again at the end; [] where there is none."""
    targets, done = {}, set()
    for one in found:
        targets.setdefault(one.importer, set()).add(one.imported)

    def search(module, way):
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for target in sorted(targets.get(module, ())):
                if closed := search(target, [*way, module]):
                    return closed
            done.add(module)
        return []

    return next((closed for module in sorted(targets) if (closed := search(module, []))), [])


def line_of(module: str) -> int | None:
    """The line of LAYERS that a module stands on: its own, else its folder's star; None where it stands on none."""
    layers = [line.split() for line in LAYERS.strip().splitlines()]
    for name in (module, f"{module.rpartition('.')[0]}.*"):
        for number, line in enumerate(layers):
            if name in line:
                return number
    return None


def upward(found: list[Import]) -> list[str]:
    """The imports that point up LAYERS, a sentence each."""
    return [
        f"{one}, which stands above it"
        for one in found
        if None not in (own := line_of(one.importer), other := line_of(one.imported)) and own > other
    ]


def made_up(source: str) -> list[int]:
    """Lines in which a module is imported by a name that is put together as the code runs: nobody can follow it."""
    calls = [node for node, _ in walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls = [
        c for c in calls if getattr(c.func, "attr", "") == "import_module" and isinstance(c.args[0], ast.JoinedStr)
    ]
    return [call.lineno for call in calls]


def brought_along(found: list[Import], module: str) -> set[str]:
    """What is imported with a module."""
    reached, ahead = set(), [module]
    while ahead:
        module = ahead.pop()
        if module not in reached:
            reached.add(module)
            ahead += [one.imported for one in found if one.importer == module and not one.late]
    return reached


def too_large(name: str, source: str) -> list[str]:
    """What is too large in a module, a sentence each."""
    lines = len(source.splitlines())
    wrong = [f"{name} has {lines} lines, and {MODULE_LINES} are enough"] * (lines > MODULE_LINES)
    for node, _ in walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first, documented = node.body[0], ast.get_docstring(node) is not None
            length = node.end_lineno - (first.end_lineno if documented else first.lineno - 1)
            if length > FUNCTION_LINES:
                wrong.append(
                    f"{name}.{node.name} has {length} lines without its signature and docstring, and {FUNCTION_LINES} "
                    f"are enough"
                )
    return wrong


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def privates(source: str) -> list[str]:
    """Private names that belong to others: of a foreign package, or of an object that is not `self`."""
    nodes = [node for node, _ in walk(ast.parse(source))]
    names = [name for node in nodes if not isinstance(node, ast.Call) for name in imported_names(node)]
    found = [name for name in names if name.split(".")[0] in FOREIGN and is_private(name)]
    own = {"self", "cls", *(name.split(".")[-1] for name in names if name.split(".")[0] in FOLDERS)}
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in inner:
            whole = ast.unparse(node)
            root, *rest = whole.split(".")
            if root not in own and is_private(".".join(rest)) and rest[-1] not in NAMED_TUPLES:
                found.append(whole)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = getattr(node.args[1], "value", "")
            if isinstance(name, str) and is_private(name):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_no_circles(package):
    """Imports inside functions and those for type checkers count: they hide a circle, they do not break it."""
    found = circle(imports(package, sources(package)))
    assert not found, f"a circle in {package}: {' → '.join(found)}"


def test_every_module_has_a_place():
    homeless = [module for module in sources(PACKAGE) if line_of(module) is None]
    assert not homeless, (
        f"{', '.join(homeless)}: say in LAYERS of test/test_house.py where it stands: above all that it imports, below "
        f"all that imports it"
    )


def test_arrows_point_down():
    wrong = upward(imports(PACKAGE, sources(PACKAGE)))
    assert not wrong, "\n".join(wrong)


def test_nothing_inside_imports_the_package_itself():
    """liger_cutedsl/__init__.py is for users: modules name those that they need."""
    found = [str(one) for one in imports(PACKAGE, sources(PACKAGE)) if one.imported == "(root)"]
    found = [one for one in found if not one.startswith("__main__ ")]
    assert not found, "\n".join(found)


def test_late_imports_have_a_reason():
    found = imports(PACKAGE, sources(PACKAGE))
    wrong = [str(one) for one in found if one.late and not one.brought and one.imported not in LATE]
    wrong += [
        f"{name} (line {n}) imports by a made-up name" for name, s in sources(PACKAGE).items() for n in made_up(s)
    ]
    assert not wrong, "inside a function, for no reason that LATE of test/test_house.py gives:\n" + "\n".join(wrong)
    for module in LATE:
        assert any(one.imported == module and one.late for one in found), (
            f"{module} is never imported late: not in LATE"
        )


@pytest.mark.parametrize("module", ["(root)", "__main__", "testing"])
def test_what_is_imported_late_does_not_come_early(module):
    wrong = brought_along(imports(PACKAGE, sources(PACKAGE)), module) & set(LATE)
    assert not wrong, [f"{name} comes with {module}: {LATE[name]}" for name in wrong]


def test_what_registers_with_liger_imports_nothing_of_ours():
    """It runs for every user of Liger-Kernel, whether they asked for this package or not."""
    path = ROOT / "src" / "liger_kernel" / "ops" / "cutedsl_flce" / "__init__.py"
    early = [name for node, late in walk(ast.parse(path.read_text())) if not late for name in imported_names(node)]
    assert sorted(early) == ["importlib", "logging", "os"]


@pytest.mark.parametrize("package", FOLDERS)
def test_modules_and_functions_stay_small(package):
    wrong = [sentence for name, source in sources(package).items() for sentence in too_large(name, source)]
    assert not wrong, "\n".join(wrong)


def test_private_names_of_others_are_used_in_compat_alone():
    wrong = [f"{m}: {p}" for m, source in sources(PACKAGE).items() if m != "compat" for p in privates(source)]
    assert not wrong, "these belong into compat.py, and into its PRIVATE:\n" + "\n".join(wrong)


DESIGN = ROOT / "docs" / "design.md"


def section(title: str) -> str:
    """A section of docs/design.md."""
    return DESIGN.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(title: str) -> list[list[str]]:
    """The names in the first column of a section's table, a list a row."""
    rows = re.findall(r"^\| (`.*?`) \|", section(title), re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def test_the_design_shows_every_room_in_its_place():
    """Each module stands there, or its folder does, in the order of LAYERS."""
    rooms = [name for row in first_column("A line a room") for name in row]
    modules = [name.removesuffix(".py").strip("/").replace("__init__", "(root)") for name in rooms]
    assert not [name for name in rooms if not (FOLDERS[PACKAGE] / name).exists()]
    heights = [line_of(module) for module in modules]
    assert heights == sorted(heights)
    missing = [m for m in sources(PACKAGE) if m not in modules and m.partition(".")[0] not in modules]
    assert not missing, f"{', '.join(missing)}: a line in docs/design.md, which says what it is for"


def test_the_glossary_names_classes_that_are_there():
    names = [name for row in first_column("Glossary") for name in row]
    assert len(names) > 20
    wrong = []
    for name in names:
        module, _, kind = name.rpartition(".")
        source = sources(PACKAGE).get(module, "")
        if not re.search(rf"^class {kind}\b", source, re.MULTILINE):
            wrong.append(name)
    assert not wrong


EMPTY = ("{}", "[]", "set()", "weakref.WeakSet()", "weakref.WeakKeyDictionary()", "weakref.WeakValueDictionary()")


def process_wide(source: str) -> set[str]:
    """Names, or Class.name, that calls change: what a function of the module declares global, and empty containers."""
    tree, found = ast.parse(source), set()
    found.update(name for node, _ in walk(tree) if isinstance(node, ast.Global) for name in node.names)
    owners = [("", tree), *((f"{n.name}.", n) for n in tree.body if isinstance(n, ast.ClassDef))]
    for prefix, owner in owners:
        for node in owner.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and ast.unparse(node.value) in EMPTY:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.add(prefix + ast.unparse(target))
    return found


def test_the_design_lists_all_process_wide_state():
    listed = {name for row in first_column("Process-wide state") for name in row}
    assert listed == {
        f"{module}.{name}" for module, source in sources(PACKAGE).items() for name in process_wide(source)
    }


def test_process_wide_state_is_seen():
    source = "a: dict = {}\nb = set()\nc = []\nd = 1\nE = (1,)\ndef f():\n    global d\n    g = {}\n"
    assert process_wide(source) == {"a", "b", "c", "d"}
    assert process_wide("class A:\n    b: ClassVar = weakref.WeakSet()\n    c: int = 1\n    d: dict\n") == {"A.b"}


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    if find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install 'ruff>=0.12'")
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


HIDDEN = {
    "in a function": "def f():\n    from p.b import g",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.b",
    "by name": "import importlib\ndef f():\n    importlib.import_module('p.b')",
    "from the package": "from p import b",
    "in a folder's __init__": "import p.folder.c",
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_circle_is_seen_however_it_is_hidden(hidden):
    modules = {"a": HIDDEN[hidden], "b": "from p.a import f", "folder": "import p.b", "folder.c": "", "(root)": ""}
    assert circle(imports("p", modules)) == ["a", "b", "a"]
    assert not circle(imports("p", {**modules, "b": "import torch, q.a"}))


def test_arrows_that_point_up_are_seen():
    up, down = Import("gemm", "routing", 7, True), Import("routing", "gemm", 8, False)
    assert upward([up, down]) == ["gemm (line 7) imports routing, which stands above it"]
    assert not upward([Import("schedules.single_pass", "schedules.kept", 1, False)])
    assert line_of("schedules.new") == line_of("schedules.kept") > line_of("schedules")
    assert line_of("new") is None and line_of("engines.new") is None


def test_private_names_are_seen_however_they_are_reached():
    source = """
import torch, torch._inductor.config
from liger_kernel.backends import registry as r
from quack._private import name
from liger_cutedsl import routing
def f(self, ctx, other):
    self._own, routing._ours, ctx.call._replace(a=1), torch.__version__
    torch._C._functorch.wrapped(), r._REGISTRY.get(1), other._theirs, f()._result, getattr(other, "_named")
"""
    assert sorted(privates(source)) == [
        "f()._result",
        "getattr(other, '_named')",
        "other._theirs",
        "quack._private.name",
        "r._REGISTRY.get",
        "torch._C._functorch.wrapped",
        "torch._inductor.config",
    ]


def test_what_is_too_large_is_seen():
    body = "    x = 1\n"
    function = 'def f(\n    a,\n    b,\n):\n    """Of\n    lines."""\n'
    assert not too_large("m", function + body * FUNCTION_LINES) and not too_large("m", "\n" * MODULE_LINES)
    assert "m.f has 46 lines" in too_large("m", function + body * (FUNCTION_LINES + 1))[0]
    assert "m.g has 46 lines" in too_large("m", "def g():\n" + body * (FUNCTION_LINES + 1))[0]
    assert "m has 301 lines" in too_large("m", "\n" * (MODULE_LINES + 1))[0]
    assert made_up("import importlib\nimportlib.import_module(f'p.{name}')") == [2]
    early = [Import("(root)", "a", 1, False), Import("a", "b", 1, False), Import("a", "c", 1, True)]
    assert brought_along(early, "(root)") == {"(root)", "a", "b"}
