"""README, CONTRIBUTING and docs: short enough, their blocks run, their links, paths, commands and tests are there, and
no figure is told that is not a committed result."""

import ast
import logging
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import liger_cutedsl
from liger_cutedsl.versions import TESTED

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmark" / "NOTES.md", ROOT / "test" / "ptx" / "README.md"]
MOST_WORDS, MOST_LINES = 1500, 150
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r"<!-- ([\w-]+): written by .*?<!-- end \1 -->", re.DOTALL)
# A block is run as a reader would, with tensors of his own, unless the line above it says why it is only parsed.
PARSED = re.compile(r"<!-- parsed: .+ -->\n$")

# What a measurement gives: times, bytes (of 10⁶; MiB are settings), errors, ratios.
FIGURES = re.compile(
    r"\d[\d.]* ?(?:ms|µs|MB|GB|TB/s|TFLOP)\b|\d(?:\.\d+)?e-\d|\d\.\d+ of the floor|\d\.\d+ (?:×|times)", re.IGNORECASE
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text(path: Path) -> str:
    return path.read_text()


def blocks(path: Path, language: str) -> list[tuple[int, str, bool]]:
    """(line, source, whether it is only parsed) of a document's blocks of a language."""
    found = []
    for match in FENCE.finditer(text(path)):
        if match[2] == language:
            line = text(path).count("\n", 0, match.start()) + 2
            found.append((line, match[3], bool(PARSED.search(text(path), 0, match.start()))))
    return found


def prose(path: Path) -> str:
    """A document without its blocks and without what the benchmark's report writes."""
    return WRITTEN.sub("", FENCE.sub("", text(path)))


def inline_code(path: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text(path)))


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\(.*?\)", "", heading).lower())
    return kept.replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text(path)), re.MULTILINE)}


def test_readme_is_short():
    words, lines = len(text(PAGES[0]).split()), len(text(PAGES[0]).splitlines())
    assert words <= MOST_WORDS and lines <= MOST_LINES, f"README has {words} words in {lines} lines: docs/ has room"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(path):
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text(path)))
    wrong = []
    for link in (link for link in links if "://" not in link):
        place, _, anchor = link.partition("#")
        target = path if not place else (path.parent / place).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def setting() -> dict:
    """What a reader of these pages has: hidden states, a head, targets, and what trainers add to them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 24, 32, generator=generator, requires_grad=True)
    lm_head = torch.nn.Linear(32, 500, bias=False)
    tokens = torch.randint(0, 500, (4, 24), generator=generator)
    advantages, old, reference, weights = torch.randn(4, 4, 24, generator=generator).unbind()
    return {
        "hidden": hidden,
        "lm_head": lm_head,
        "head": lm_head,
        "labels": tokens,
        "tokens": tokens,
        "choices": torch.tensor([3, 7, 400]),
        "advantages": advantages,
        "old": old - 7.0,
        "reference": reference - 7.0,
        "weights": weights.abs(),
        "x": hidden.detach().reshape(-1, 32).requires_grad_(),
        "weight": lm_head.weight,
        "target": tokens.reshape(-1),
        "fused_linear_loss": liger_cutedsl.fused_linear_loss,
        "row_loss": lambda values: -values.log_prob,
        "row_tensors": (),
    }


@pytest.fixture
def as_before():
    """Blocks may call enable() and set up logging."""
    root, ours = logging.getLogger(), logging.getLogger("liger_cutedsl")
    handlers, level = list(root.handlers), ours.level
    yield
    liger_cutedsl.disable()
    root.handlers[:], ours.level = handlers, level
    ours.manager._clear_cache()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_blocks_run(path, as_before):
    """One after the other, in one namespace; those that are only parsed say why."""
    names, ran = setting(), 0
    for line, source, parsed in blocks(path, "python"):
        tree = ast.parse(source)
        if not parsed:
            ran += 1
            code = compile(ast.increment_lineno(tree, line - 1), name_of(path), "exec")
            exec(code, names)
    assert ran or not blocks(path, "python")


def test_blocks_that_are_only_parsed_are_few():
    parsed = [f"{name_of(p)}:{line}" for p in PAGES for line, _, only in blocks(p, "python") if only]
    assert len(parsed) <= 6 and not any(place.startswith("README") for place in parsed), parsed


def commands() -> list[tuple[str, str]]:
    """(document, command) of every shell block's line and every inline command of ours."""
    found = []
    for path in PAGES:
        lines = [line for _, source, _ in blocks(path, "bash") for line in source.splitlines()]
        lines += [
            code for code in inline_code(path) if re.match(r"(\S+=\S+ )?(\S*/)?(python|make|torchrun|pip) ", code)
        ]
        found += [(name_of(path), line) for line in dict.fromkeys(lines) if line.strip()]
    return found


def checked(words: list[str]) -> None:
    """Fails where a command cannot be what its page says: an unknown target, module, option or file."""
    program = words[0].rpartition("/")[2]
    if program == "make":
        assert re.search(rf"^{words[1]}:", text(ROOT / "Makefile"), re.MULTILINE)
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", words[-1])
        declared = text(ROOT / "pyproject.toml")
        assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for e in extras for extra in e.split(","))
    elif "-m" in words:
        module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        if module in ("liger_cutedsl", "benchmark"):
            parsed(module, arguments)
        else:
            assert module in ("pytest", "ruff") or (ROOT / f"{module.replace('.', '/')}.py").exists()
            files = [word for word in arguments if word.startswith(("test/", "examples/"))]
            assert all((ROOT / file).exists() for file in files)
    else:
        files = [word for word in words[1:] if "/" in word]
        assert files and all((ROOT / file).exists() for file in files)


def parsed(module: str, arguments: list[str]) -> None:
    """Whether a command line of ours is accepted, without what it does."""
    from benchmark import __main__ as benchmark

    from liger_cutedsl import __main__ as ours

    with pytest.MonkeyPatch.context() as patch:
        for name in ("report", "run_check", "run_compile"):
            patch.setattr(ours, name, lambda *_: 0)
        for name in ("report", "roofline", "steps", "density", "train"):
            patch.setattr(getattr(benchmark, name), "main", lambda *_: 0)
        patch.setattr(benchmark, "run", lambda *_: 0)
        main = ours.main if module == "liger_cutedsl" else benchmark.main
        try:
            assert main(arguments) == 0
        except SystemExit as end:  # --version, or an option that there is not
            assert end.code == 0, f"{module} {arguments}"


def test_commands_are_there():
    found = commands()
    assert len(found) > 20
    for document, line in found:
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:
            words = words[1:]
        if words and words[-1] != "train.py":  # a reader's own
            try:
                checked(words)
            except AssertionError as error:
                raise AssertionError(f"{document}: {line}") from error


@pytest.mark.parametrize("command", ["make nothing", "pip install '.[none]'", "python examples/none.py"])
def test_commands_that_are_not_there_are_seen(command):
    with pytest.raises(AssertionError):
        checked(shlex.split(command))


def test_options_that_there_are_not_are_seen(capsys):
    for command in ("python -m liger_cutedsl --chek", "python -m benchmark reprot"):
        with pytest.raises(AssertionError):
            checked(shlex.split(command))
    capsys.readouterr()


def test_make_help_lists_the_targets():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    printed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    declared = re.search(r"^\.PHONY: (.*)$", text(ROOT / "Makefile"), re.MULTILINE)[1].split()
    assert re.findall(r"^  make (\w+) ", printed, re.MULTILINE) == declared
    assert re.search(r"^test: lint ", text(ROOT / "Makefile"), re.MULTILINE), "CI runs make test, and so ruff"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_that_are_named_are_there(path):
    names = [code for code in inline_code(path) if re.fullmatch(r"(src|test|benchmark|examples|docs)/[\w./]+", code)]
    assert not [name for name in names if not (ROOT / name).exists()]


def test_the_tests_of_the_guarantees_are_there():
    file, wrong, count = None, [], 0
    for code in inline_code(ROOT / "docs" / "guarantees.md"):
        match = re.fullmatch(r"(test_\w+\.py)?(?:::(\w+)(…?))?", code)
        if not match or not (match[1] or match[2]):
            continue
        file, count = match[1] or file, count + 1
        source = text(ROOT / "test" / file) if (ROOT / "test" / file).exists() else ""
        end = r"\w*\(" if match[3] else r"\("
        if not source or (match[2] and not re.search(rf"^def {match[2]}{end}", source, re.MULTILINE)):
            wrong.append(code)
    assert count > 40 and not wrong


def paragraphs_with_figures(document: str) -> list[str]:
    """The figures of paragraphs that do not lead to the notes."""
    found = (p for p in document.split("\n\n") if "NOTES.md" not in p)
    return [match[0] for paragraph in found for match in FIGURES.finditer(paragraph)]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_figure_outside_the_committed_results(path):
    """Tables are written from the JSON; what else was measured is told in benchmark/NOTES.md, which is linked."""
    assert not paragraphs_with_figures(prose(path))


def test_figures_are_seen():
    said = "It takes 38.3 ms, 1.02 of the floor, with 543 MB, an error of 1.8e-3 and 1.5 times less."
    assert len(paragraphs_with_figures(said)) == 5
    assert not paragraphs_with_figures(f"{said} See [the notes](../benchmark/NOTES.md).")
    assert not paragraphs_with_figures("560 MiB, 2048 tokens, 2⁻⁸ and 3% are settings.")


def test_tested_versions_are_those_of_the_code():
    section = text(ROOT / "docs" / "guarantees.md").partition("## Versions")[2].partition("\n## ")[0]
    told = section.partition("Tested: ")[2].partition(". `python")[0].replace("\n", " ")
    for package, versions in TESTED.items():
        part = told.partition(f"{package} ")[2]
        part = re.split(r", (?=[a-z])", part)[0]
        assert part and all(version in part for version in versions), package


def test_development_tools_are_pinned():
    """Each to one version, as the package's own dependencies are in constraints-dev.txt."""
    declared = text(ROOT / "pyproject.toml").partition("dev = [")[2].partition("\n]")[0]
    wanted = re.findall(r'^  "([\w-]+)', declared, re.MULTILINE)
    pinned = re.findall(r"^([\w-]+)==", text(ROOT / "constraints-dev.txt"), re.MULTILINE)
    assert len(wanted) > 10 and not set(wanted) - set(pinned)


def test_the_version_stands_in_one_place():
    assert 'dynamic = ["version"]' in text(ROOT / "pyproject.toml")
    assert not re.search(r"^version = \"", text(ROOT / "pyproject.toml"), re.MULTILINE)
    from importlib.metadata import version

    assert version("liger-cutedsl") == liger_cutedsl.__version__
    assert f"## {liger_cutedsl.__version__} " in text(ROOT / "CHANGELOG.md")


def test_type_checkers_find_the_types():
    assert Path(liger_cutedsl.__file__).with_name("py.typed").exists()
