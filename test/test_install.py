"""A real install in a fresh environment, where only files, not our import, can tell Liger about us."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent

USES_OURS = """
import torch
import liger_kernel.ops as ops
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_llama
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
import liger_kernel.functional
import liger_kernel.transformers.fused_linear_cross_entropy as module
import liger_kernel.transformers.functional as functional
from transformers import LlamaConfig, LlamaForCausalLM

ours = [c.__module__.startswith("liger_cutedsl") for c in (
    ops.LigerFusedLinearCrossEntropyFunction,
    module.LigerFusedLinearCrossEntropyFunction,
    functional.LigerFusedLinearCrossEntropyFunction,
)]
print("ours", ours)
from liger_kernel.backends import registry, available_impls
print("auto", available_impls("fused_linear_cross_entropy")[0])
if all(ours):
    x, w = torch.randn(9, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    t = torch.tensor([0, 1, 2, -100, 4, 5, 6, 7, 39])
    expected = torch.nn.functional.cross_entropy(x @ w.T, t)
    grads = torch.autograd.grad(expected, (x, w))
    for name, loss in dict(
        function=ops.LigerFusedLinearCrossEntropyFunction.apply(x, w, t)[0],
        module=LigerFusedLinearCrossEntropyLoss()(w, x, t),
        functional=liger_fused_linear_cross_entropy(x, w, t),
        dispatcher=liger_kernel.functional.fused_linear_cross_entropy(x, w, t)[0],
        by_name=liger_kernel.functional.fused_linear_cross_entropy(x, w, t, impl="nvidia-cutedsl")[0],
    ).items():
        torch.testing.assert_close(loss, expected)
        for got, want in zip(torch.autograd.grad(loss, (x, w)), grads):
            torch.testing.assert_close(got, want)
        print("right", name)
    apply_liger_kernel_to_llama(rope=False, swiglu=False, rms_norm=False, cross_entropy=False)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes))
    ids = torch.randint(0, 300, (2, 12))
    fused = model(input_ids=ids, labels=ids).loss
    logits = model(input_ids=ids).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(fused, plain)
    print("right llama")
"""


def project_files() -> list[str]:
    """The project's own files, relative to its root: what git knows or, in an unpacked sdist, all that is not built."""
    if (ROOT / ".git").exists():
        listed = ["git", "ls-files", "-co", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        return [name for name in names if (ROOT / name).is_file()]
    built = {"build", "dist", "__pycache__"}
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(f) for f in files if not any(p in built or p.startswith(".") or "egg-info" in p for p in f.parts)]


def copy_project(folder: Path) -> None:
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def test_the_sdist_holds_all_that_tests_need(tmp_path):
    """All of the tests, with their probes and workers, the benchmark and the examples; and nothing built."""
    pytest.importorskip("setuptools", minversion="77")
    copy_project(tmp_path / "source")
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "source", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    folders = ("src/", "test/", "benchmark/", "examples/", "docs/")
    wanted = {name for name in project_files() if name.startswith(folders) or "/" not in name}
    missing = {name for name in wanted - held if not name.startswith(".")}
    assert not missing
    assert "test/conftest.py" in held and "benchmark/__main__.py" in held
    assert not [name for name in held if "__pycache__" in name or name.endswith(".so")]


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory):
    """A new environment with liger-kernel and our wheel installed in it; torch and the like are borrowed."""
    root = tmp_path_factory.mktemp("fresh")
    venv.create(root / "venv", with_pip=True)
    python = root / "venv" / "bin" / "python"

    def pip(*arguments):
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *arguments], check=True)

    source = root / "source"
    copy_project(source)
    pip("liger-kernel==0.8.5", str(source))
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    # After the environment's own folder on the path: what is installed here wins over what is borrowed.
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(python, code, **environment):
    """What a process prints, outside of this repository and without Liger's variables but those given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LIGER_") and k != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], env={**clean, **environment}, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_wheel_puts_one_file_below_liger_kernel(fresh_python):
    listed = run(
        fresh_python,
        "from importlib.metadata import files; print(*sorted(str(f) for f in files('liger-cutedsl')), sep='\\n')",
    )
    below = [f for f in listed.split() if f.startswith("liger_kernel/") and f.endswith(".py")]
    assert below == ["liger_kernel/ops/cutedsl_flce/__init__.py"]
    where = run(
        fresh_python,
        "import liger_cutedsl, liger_kernel; print(liger_cutedsl.__file__, liger_kernel.__file__)",
    )
    assert all(str(fresh_python.parent.parent) in path for path in where.split())


def test_environment_variable_selects_our_operator(fresh_python):
    printed = run(fresh_python, USES_OURS, LIGER_KERNEL_IMPL="cutedsl")
    assert "ours [True, True, True]" in printed
    assert printed.count("right") == 6


def test_without_the_variable_liger_is_untouched(fresh_python):
    printed = run(fresh_python, USES_OURS)
    assert "ours [False, False, False]" in printed
    assert "auto nvidia-triton" in printed


def test_registration_imports_nothing_heavy(fresh_python):
    code = "import sys, liger_kernel.ops; print([m for m in sys.modules if m.startswith(('liger_cutedsl', 'quack'))])"
    assert run(fresh_python, code).strip() == "[]"


def test_runs_where_cute_dsl_is_missing(fresh_python):
    hide = "import sys; sys.modules['cutlass'] = sys.modules['quack'] = None\n"
    assert "right llama" in run(fresh_python, hide + USES_OURS, LIGER_KERNEL_IMPL="cutedsl")


def test_report(fresh_python):
    done = subprocess.run([fresh_python, "-m", "liger_cutedsl"], capture_output=True, text=True, cwd="/", check=True)
    assert "LIGER_KERNEL_IMPL=cutedsl loads liger_cutedsl.liger.operators" in done.stdout
    assert "Llama-3 8B" in done.stdout and "torch" in done.stdout


def test_what_the_package_requires(fresh_python):
    """packaging is Liger's and ours, and nothing but torch brings it; what needs triton is for Linux."""
    code = "from importlib.metadata import requires; print(*requires('liger-cutedsl'), sep='\\n')"
    requirements = [Requirement(line) for line in run(fresh_python, code).splitlines()]

    def needed(**machine):
        chosen = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": "", **machine})]
        return {r.name: r.specifier for r in chosen}

    assert set(needed(platform_system="Darwin", sys_platform="darwin")) == {"torch", "packaging"}
    linux = needed(platform_system="Linux", sys_platform="linux")
    assert {"torch", "packaging", "liger-kernel", "triton"} < set(linux)
    assert [v for v in ("0.8.3", "0.8.4", "0.8.5", "0.9.0") if v in linux["liger-kernel"]] == ["0.8.4", "0.8.5"]


@pytest.fixture(scope="module")
def other_liger(fresh_python, tmp_path_factory):
    """Another version of Liger-Kernel in a folder of its own, without our registration or with it."""

    def install(version, registered):
        folder = tmp_path_factory.mktemp("liger")
        arguments = ["-m", "pip", "install", "-q", "--no-deps", "--target", folder, f"liger-kernel=={version}"]
        subprocess.run([fresh_python, *arguments], check=True)
        if registered:
            ours = "liger_kernel/ops/cutedsl_flce/__init__.py"
            (folder / ours).parent.mkdir()
            (folder / ours).write_bytes((ROOT / "src" / ours).read_bytes())
        return str(folder)

    return install


@pytest.mark.parametrize("version", ["0.8.1", "0.8.3"])
def test_no_version_of_liger_is_broken_by_our_registration(fresh_python, other_liger, version):
    """pip warns of a version that we do not support, and installs it all the same."""
    folder = other_liger(version, registered=True)
    code = "import liger_kernel.ops as ops, liger_kernel.transformers; print(ops.__file__, ops.LigerRMSNormFunction)"
    assert folder in run(fresh_python, code, PYTHONPATH=folder)
    # with the variable, the operator that this version selects is ours or Liger's own: nothing fails
    assert folder in run(fresh_python, code, PYTHONPATH=folder, LIGER_KERNEL_IMPL="cutedsl")


def test_a_liger_that_lacks_what_we_register_with_is_not_broken(fresh_python, other_liger):
    """A later one, say, that gave its registries other names."""
    folder = other_liger("0.8.4", registered=True)
    for file in Path(folder, "liger_kernel").rglob("*.py"):
        if file.parent.name != "cutedsl_flce":
            file.write_text(file.read_text().replace("ImplInfo", "Info").replace("_DISCOVERY_MAP", "_LOCATIONS"))
    code = "import liger_kernel.ops as ops; print(ops.LigerFusedLinearCrossEntropyFunction.__module__)"
    assert run(fresh_python, code, PYTHONPATH=folder).strip() == "liger_kernel.ops.fused_linear_cross_entropy"


def test_the_lowest_version_of_liger_works_whole(fresh_python, other_liger):
    folder = other_liger("0.8.4", registered=True)
    printed = run(fresh_python, USES_OURS, LIGER_KERNEL_IMPL="cutedsl", PYTHONPATH=folder)
    assert "ours [True, True, True]" in printed and printed.count("right") == 6


def test_a_wheel_beside_a_liger_in_another_folder_is_reported(fresh_python, other_liger):
    """As with a Liger-Kernel of the system and this package in the user's folder."""
    folder = other_liger("0.8.4", registered=False)
    environment = {**os.environ, "PYTHONPATH": folder}
    command = [fresh_python, "-m", "liger_cutedsl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "Liger does not find this package" in line]
    own = fresh_python.parent.parent / "lib"
    assert f"{folder}/liger_kernel" in line and f"{own}" in line and "cutedsl_flce" in line and "enable()" in line
