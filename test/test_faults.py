"""What goes wrong around the operator: kernel caches, packages, drivers; and what a user is told."""

import os
import re
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import liger_cutedsl
from liger_cutedsl import ahead_of_time, fused_linear_cross_entropy, kernel_cache, routing, testing, versions
from liger_cutedsl.engines import KernelFailure
from reference import Case

ROOT = Path(__file__).parent.parent
ONE_KERNEL = "backward/bf16/plain"


@pytest.fixture
def quack_cache(monkeypatch):
    cache = pytest.importorskip("quack.cache")
    monkeypatch.setattr(cache, "CACHE_DIR", None)
    monkeypatch.setattr(cache, "CACHE_ENABLED", True)
    return cache


def test_kernels_are_kept_where_only_their_user_may_write(quack_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_cache.use_private_cache()
    folder = tmp_path / "liger_cutedsl" / "kernels"
    assert str(folder) == quack_cache.CACHE_DIR
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_user_without_a_home_has_a_folder_in_the_temporary_one(quack_cache, monkeypatch, tmp_path):
    """As in a container that runs under an arbitrary user."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    file = tmp_path / "file"
    file.write_text("")
    for home in ("~", str(file)):  # none is known, or none can be made
        monkeypatch.setattr(kernel_cache.os.path, "expanduser", lambda path, home=home: path.replace("~", home))
        monkeypatch.setattr(quack_cache, "CACHE_DIR", None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel_cache.use_private_cache()
        folder = Path(quack_cache.CACHE_DIR)
        assert folder == tmp_path / f"liger_cutedsl-{os.getuid()}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_chosen_folder_is_kept(quack_cache, monkeypatch, tmp_path):
    monkeypatch.setattr(quack_cache, "CACHE_DIR", str(tmp_path / "chosen"))
    kernel_cache.use_private_cache()
    assert str(tmp_path / "chosen") == quack_cache.CACHE_DIR and (tmp_path / "chosen").is_dir()


def test_a_folder_others_can_write_is_not_read(quack_cache, monkeypatch, tmp_path):
    (tmp_path / "fingerprint").mkdir()
    (tmp_path / "fingerprint" / "planted.o").write_bytes(b"")
    tmp_path.chmod(0o777)
    monkeypatch.setattr(quack_cache, "CACHE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"others can write to it.*chmod o-w.*QUACK_CACHE_DIR=FOLDER"):
        kernel_cache.use_private_cache()
    assert str(tmp_path) != quack_cache.CACHE_DIR
    assert not list(Path(quack_cache.CACHE_DIR).rglob("*.o"))


def refused(quack_cache, folder, reason):
    """Whether a folder with a kernel in it is refused for a reason, and the kernel not read."""
    with pytest.warns(RuntimeWarning, match=f"cannot be kept in .*{reason}.*QUACK_CACHE_DIR=FOLDER"):
        kernel_cache.use_private_cache()
    assert str(folder) != quack_cache.CACHE_DIR
    assert not list(Path(quack_cache.CACHE_DIR).rglob("*.o"))


@pytest.fixture
def chosen(quack_cache, monkeypatch, tmp_path):
    """A folder for QUACK_CACHE_DIR with a kernel in it, in a folder of its own."""
    folder = tmp_path / "parent" / "kernels"
    kernel = folder / "fingerprint" / "planted.o"
    for part in (folder.parent, folder, kernel.parent):
        part.mkdir()
        part.chmod(0o755)
    kernel.write_bytes(b"")
    kernel.chmod(0o644)
    monkeypatch.setattr(quack_cache, "CACHE_DIR", str(folder))
    return folder


def test_a_folder_that_only_its_user_can_write_is_kept(quack_cache, chosen):
    """Others may look. A sticky parent is /tmp's kind, and a link of the user's own may lead there."""
    link = chosen.parent / "link"
    link.symlink_to(chosen)
    chosen.parent.parent.chmod(0o1777)
    for folder in (chosen, link):
        quack_cache.CACHE_DIR = str(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel_cache.use_private_cache()
        assert str(folder) == quack_cache.CACHE_DIR


@pytest.mark.parametrize(
    "part, mode, reason",
    [
        (".", 0o775, r"others can write to it.*chmod g-w makes it usable"),
        (".", 0o757, r"others can write to it.*chmod o-w makes it usable"),
        (".", 0o1777, r"others can write to it.*chmod o-w,g-w makes it usable"),
        ("..", 0o777, r"others can write to .*/parent, .*chmod o-w.* makes it usable"),
        ("fingerprint", 0o775, r"others can write to .*/fingerprint, .*chmod 700 .*/kernels makes it usable"),
        ("fingerprint/planted.o", 0o664, r"others can write to .*/planted.o, .*chmod 700 .*/kernels makes it usable"),
    ],
)
def test_what_others_can_write_is_not_read(quack_cache, chosen, part, mode, reason):
    (chosen / part).resolve().chmod(mode)
    refused(quack_cache, chosen, reason)
    (chosen / part).resolve().chmod(0o700)  # the remedies are ones
    for folder in (chosen, chosen.parent):
        folder.chmod(0o700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quack_cache.CACHE_DIR = str(chosen)
        kernel_cache.use_private_cache()
    assert str(chosen) == quack_cache.CACHE_DIR


def test_a_group_that_is_the_users_alone_may_write_above_the_folder(quack_cache, chosen, monkeypatch):
    """A umask of 002 leaves ~/.cache so."""
    chosen.parent.chmod(0o775)
    for private in (True, False):
        quack_cache.CACHE_DIR = str(chosen)
        monkeypatch.setattr(kernel_cache, "_is_private", lambda gid, private=private: private)
        if private:
            kernel_cache.use_private_cache()
            assert str(chosen) == quack_cache.CACHE_DIR
        else:
            refused(quack_cache, chosen, "others can write to .*/parent, .*chmod g-w")


def test_whose_a_group_is(monkeypatch):
    import grp
    import pwd
    from types import SimpleNamespace

    user = SimpleNamespace(pw_name="ann", pw_gid=77)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    for gid, name, members, private in (
        (77, "ann", [], True),
        (77, "ann", ["ann"], True),
        (77, "ann", ["bob"], False),
        (77, "staff", [], False),
        (78, "ann", [], False),
    ):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert kernel_cache._is_private(gid) == private, (gid, name, members)

    def unknown(_):
        raise KeyError

    monkeypatch.setattr(grp, "getgrgid", unknown)
    assert not kernel_cache._is_private(77)


@pytest.mark.parametrize("target", ["kernels", "nothing"])
def test_a_link_in_the_temporary_folder_is_not_followed(quack_cache, chosen, monkeypatch, target):
    shared = chosen.parent.parent / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / f"liger_cutedsl-{os.getuid()}").symlink_to(chosen.parent / target)
    (chosen.parent.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(chosen.parent.parent / "file"))  # no home
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(shared))
    quack_cache.CACHE_DIR = None
    reason = "it is a link in a folder that others can write to" if target == "kernels" else "it cannot be created"
    refused(quack_cache, shared / f"liger_cutedsl-{os.getuid()}", reason)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize("part", [".", "..", "fingerprint", "link"])
def test_what_belongs_to_others_is_not_read(quack_cache, chosen, part):
    folder, reason = chosen, "belongs to others" if part != "fingerprint" else "others can write to .*/fingerprint"
    if part == "link":
        folder = chosen.parent / "link"
        folder.symlink_to(chosen)
        os.lchown(folder, 12345, -1)
    else:
        os.chown((chosen / part).resolve(), 12345, -1)
    quack_cache.CACHE_DIR = str(folder)
    refused(quack_cache, folder, reason)


@pytest.mark.parametrize("obstacle", ["it cannot be written", "it cannot be created (read-only)"])
def test_what_a_read_only_folder_holds_is_found(quack_cache, monkeypatch, tmp_path, obstacle):
    kernel = tmp_path / "fingerprint" / "kernel.o"
    kernel.parent.mkdir()
    kernel.write_bytes(b"machine code")
    monkeypatch.setattr(quack_cache, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "obstacle_of", lambda folder: obstacle)  # root may write anywhere
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*" + re.escape(obstacle)):
        kernel_cache.use_private_cache()
    (found,) = Path(quack_cache.CACHE_DIR).rglob("*.o")
    assert found.parent.name == "fingerprint" and found.read_bytes() == b"machine code"


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be created" in kernel_cache.obstacle_of(tmp_path / "file" / "kernels")
    assert "cannot be created" in kernel_cache.obstacle_of(tmp_path / "file")


def compile_once(folder, count=1):
    """Compiles one kernel in `count` processes at once, into one cache folder."""
    pytest.importorskip("quack")
    code = (
        "import sys, quack.gemm_runtime.host as host; host.get_max_active_clusters = lambda *_: 1\n"
        "from liger_cutedsl.ahead_of_time import _trace, all_variants\n"
        f"_trace(next(v for v in all_variants() if v.name == {ONE_KERNEL!r})); print('done')"
    )
    environment = {**os.environ, "QUACK_ARCH": "90", "CUDA_VISIBLE_DEVICES": "", "QUACK_CACHE_DIR": str(folder)}
    environment["CUTE_DSL_ARCH"] = "sm_90a"
    command = [sys.executable, "-W", "ignore", "-c", code]
    running = [
        subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) for _ in range(count)
    ]
    return [(process.communicate(timeout=200)[0], process.returncode) for process in running]


@pytest.mark.slow
def test_processes_that_start_at_once_share_the_cache_and_a_corrupt_kernel_is_compiled_again(tmp_path):
    for output, status in compile_once(tmp_path, count=2):
        assert status == 0 and "done" in output, output[-2000:]
    (kernel,) = tmp_path.rglob("*.o")
    whole = kernel.read_bytes()
    kernel.write_bytes(whole[: len(whole) // 2])
    ((output, status),) = compile_once(tmp_path)
    assert status == 0 and "corrupt cached object" in output, output[-2000:]
    assert len(kernel.read_bytes()) == len(whole)
    assert not [p for p in tmp_path.rglob("*") if p.stat().st_mode & stat.S_IWOTH], "others may write"


@pytest.fixture(params=["forward"])
def broken_cute(request):
    """A CPU that takes the CuTe engine for possible, and fails in it, where a kernel is launched: as a GPU with an old
    driver would the first time, or one that no forward has needed."""
    with testing.planted_kernel_failure(request.param, on_cpu=True):
        yield


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_kernel_that_fails_is_replaced_unless_it_was_forced(broken_cute, reduction, compiled):
    x, weight, target = torch.randn(8, 16), torch.randn(50, 16, requires_grad=True), torch.arange(8)
    torch._dynamo.reset()
    run = fused_linear_cross_entropy
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with pytest.raises(KernelFailure, match="planted"):
        run(x, weight, target, reduction=reduction, engine="cute")
    loss = run(x, weight, target, reduction=reduction)
    expected = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    found, want = (torch.autograd.grad(v.sum(), weight)[0] for v in (loss, expected))
    torch.testing.assert_close(found, want)
    assert "planted" in testing.kernel_failure()


@pytest.mark.parametrize("broken_cute", ["backward"], indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_kernel_that_fails_in_backward_is_replaced_unless_it_was_forced(broken_cute, reduction, compiled):
    x, weight = torch.randn(40, 16).requires_grad_(), torch.randn(3000, 16, requires_grad=True)
    target, upstream = torch.arange(40), torch.full((40,) if reduction == "none" else (), 0.7)
    target[::3] = -100
    torch._dynamo.reset()
    run = torch.compile(fused_linear_cross_entropy, fullgraph=True, backend="aot_eager") if compiled else None
    run, call = run or fused_linear_cross_entropy, dict(reduction=reduction, schedule="recompute", workspace_mb=0.05)
    with pytest.raises(KernelFailure, match="planted"):
        run(x, weight, target, engine="cute", **call).backward(upstream)
    loss = run(x, weight, target, **call)
    assert testing.kernel_failure() is None, "forward works"
    expected = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction=reduction)
    for found, want in zip(
        torch.autograd.grad(loss, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(found, want)
    assert "planted" in testing.kernel_failure()


def test_ligers_functions_survive_a_kernel_that_fails(broken_cute):
    from liger_cutedsl.liger.operators import fused_linear_cross_entropy_forward

    x, weight, target = torch.randn(8, 16), torch.randn(50, 16, requires_grad=True), torch.arange(8)
    loss, *_, grad_weight, _ = fused_linear_cross_entropy_forward(x, weight, target, compute_gradients=True)
    expected = torch.nn.functional.cross_entropy(x @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad_weight, torch.autograd.grad(expected, weight)[0])


def test_a_failed_kernel_says_what_to_do():
    pytest.importorskip("quack")
    from liger_cutedsl.engines.cute_engine import _failure_text

    text = _failure_text(RuntimeError("CUDA driver version is insufficient"))
    for advice in ("insufficient", "python -m liger_cutedsl", "QUACK_CACHE_DIR", "LIGER_CUTEDSL_ENGINE=triton"):
        assert advice in text


def test_a_broken_cute_dsl_is_a_reason(monkeypatch):
    def broken(name):
        raise AttributeError("module 'cutlass' has no attribute 'cute'")

    monkeypatch.setattr(routing.importlib, "import_module", broken)
    reason = routing._cute_import_error.__wrapped__()
    assert "does not import" in reason and "has no attribute 'cute'" in reason and "python -m liger_cutedsl" in reason


def test_a_missing_disassembler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(ahead_of_time.shutil, "which", lambda *_: None)
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvdisasm"):
        ahead_of_time.find_nvdisasm.__wrapped__()


@pytest.fixture
def installed_versions(monkeypatch):
    """What importlib.metadata says is installed."""
    installed = {"torch": "2.14.0+cu130", "triton": "3.6.0", "quack-kernels": "0.6.6", "transformers": "5.24.0"}

    def version(package):
        if package not in installed:
            raise versions.metadata.PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(versions.metadata, "version", version)
    return installed


def test_versions_outside_the_tested_ones_are_named(installed_versions):
    with pytest.warns(RuntimeWarning) as caught:
        versions.warn_about_untested_versions()
    (warning,) = caught
    assert "with quack-kernels 0.6.6 (tested: 0.6.5)." in str(warning.message)
    installed_versions["nvidia-cutlass-dsl"] = "4.9.0.dev1"
    with pytest.warns(RuntimeWarning, match=r"nvidia-cutlass-dsl 4.9.0.dev1 \(tested: 4.8.1\)"):
        versions.warn_about_untested_versions()


def test_versions_of_what_is_not_pinned_are_for_the_report(installed_versions, capsys):
    """A newer torch is an ordinary thing to have: no import warns of it."""
    from liger_cutedsl.__main__ import report

    installed_versions.update({"torch": "2.99.0+cpu", "quack-kernels": "0.6.5", "liger-kernel": "0.8.1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_about_untested_versions()
    report()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    lowest, highest = versions.TESTED["torch"]
    assert f"torch 2.99.0+cpu, not tested: {lowest} to {highest} was" in lines
    assert "liger-kernel 0.8.1, not tested: 0.8.4 to 0.8 was" in lines and "triton 3.6.0" in lines


INSIDE = ("2.11.0", "2.11.0+cu130", "2.14.1", "2.14.0rc1")
OUTSIDE = ("2.9.1", "2.10.0", "2.15.0a0+git1", "3.0", "unknown")


@pytest.mark.parametrize("version", [*INSIDE, *OUTSIDE])
def test_a_version_counts_as_far_as_the_tested_ones_are_written(version):
    assert versions._between(version, "2.11", "2.14") is (version in INSIDE)


# torch 2.14 is a CUDA build of several GB, tested apart, and triton 3.8 is what comes with it
TESTED_APART = {"torch": "2.14", "triton": "3.8"}


def test_the_tested_versions_are_those_that_are_installed_for_tests():
    constraints = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE))
    for package, (lowest, highest) in versions.TESTED.items():
        assert versions._between(constraints[package], lowest, highest), package
        newest = TESTED_APART.get(package, constraints[package])
        assert newest.startswith(highest), f"{package}: the newest tested is what tests install"


def test_threads():
    """Calls from many threads at once give what they give one after the other."""

    def step(seed):
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (40, 300))
        target = torch.randint(0, 300, (40,), generator=generator)
        loss = fused_linear_cross_entropy(x, weight, target, schedule=("recompute", "single_pass")[seed % 2])
        loss.backward()
        return loss.detach(), x.grad, weight.grad

    expected = [step(seed) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(step, range(12)))
    for got, want in zip(found, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_the_same_inputs_give_the_same_bits(place):
    """Run to run, and under torch.use_deterministic_algorithms."""
    case = Case(tokens=100, vocab=700, dtype=place.dtypes[0], device=place.device, bias=True, ce_weight=True)
    x, weight, target, bias, ce_weight = case.tensors()
    options = dict(softcap=10.0, label_smoothing=0.1, lse_square_scale=1e-3, return_predicted_tokens=True)

    def step():
        out = fused_linear_cross_entropy(x, weight, target, bias=bias, ce_weight=ce_weight, **options, **place.call)
        return out.loss.detach(), *torch.autograd.grad(out.loss, (x, weight, bias))

    first = step()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks of deterministic GPU products
    torch.use_deterministic_algorithms(True)
    try:
        again = step()
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, c in zip(first, again, step(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_no_code_is_read_from_data():
    """No pickle, eval or exec in the package: what it reads from disk is kernels, by quack, from the private folder."""
    for source in (Path(liger_cutedsl.__file__).parent).rglob("*.py"):
        assert not re.search(r"\b(pickle|marshal|eval\(|exec\()", source.read_text()), source
