"""The CuTe kernels on a machine without a GPU: they compile, their machine code is what it should be, and on
Blackwell each element of a tile belongs to exactly one register, at the column the reductions take it for."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import liger_cutedsl
from liger_cutedsl import ahead_of_time, kernel_variants
from liger_cutedsl.__main__ import main
from liger_cutedsl.ahead_of_time import Compiled, check
from liger_cutedsl.engines import architectures
from liger_cutedsl.epilogues import EpilogueFlags

pytest.importorskip("quack", reason="quack is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The kernels compiled here stay here."""
    patch = pytest.MonkeyPatch()
    patch.setenv("QUACK_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
    yield
    patch.undo()


# A kernel takes seconds to compile, so that `make test` compiles a few: the plainest and the fullest.
FEW = ("backward/bf16/plain", "forward/fp16/bias", "exp/fp16/bias", "dw-sum")


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.blackwell)])
def test_kernels_compile_for_every_architecture(few, capsys, monkeypatch):
    if few:
        chosen = [variant for variant in kernel_variants.typical_variants() if variant.name.startswith(FEW)]
        monkeypatch.setattr(kernel_variants, "typical_variants", lambda: chosen)
    status = main(["compile", "--typical", "--json"])
    kernels = [Compiled(**row) for row in json.loads(capsys.readouterr().out)]
    assert status == 0, [k for k in kernels if k.error]
    assert len(kernels) >= (len(FEW) if few else 16) * len(architectures.SUPPORTED_TARGETS)
    assert {k.arch for k in kernels} == set(architectures.SUPPORTED_TARGETS)
    for k in kernels:
        assert k.registers > 0 and k.seconds > 0
        if k.arch != "sm_90a":
            assert "UTCHMMA.2CTA" in k.matrix_instruction, k
            # what benchmark/NOTES.md says of Blackwell: a few spilled words at most, except with everything at once
            assert k.spilled_words <= (16 if "argmax" not in k.name else 180), k
        else:
            assert "HGMMA" in k.matrix_instruction, k
        assert (k.tma_stores == 0) == k.name.startswith("forward"), k


def test_compile_prints_a_table_and_fails_where_a_kernel_does(monkeypatch, capsys):
    good = Compiled("sm_100a", "forward/bf16/plain", "256x256/2x1", 200, 0, "4 UTCHMMA.2CTA", 0, 2.0)
    monkeypatch.setattr(ahead_of_time, "compile_architecture", lambda *_: [good])
    assert main(["compile", "--arch", "sm_100a"]) == 0
    assert "UTCHMMA.2CTA" in capsys.readouterr().out
    bad = Compiled("sm_100a", "forward/bf16/plain", error="broken")
    monkeypatch.setattr(ahead_of_time, "compile_architecture", lambda *_: [good, bad])
    assert main(["compile", "--arch", "sm_100a"]) == 1
    assert "FAILED: broken" in capsys.readouterr().out


def test_check_refuses_what_a_kernel_must_not_be():
    def of(arch="sm_100a", name="forward/bf16/plain", instruction="4 UTCHMMA.2CTA", stores=0):
        return check(Compiled(arch, name, "", 200, 0, instruction, stores))

    assert of() == ""
    assert "no 2-CTA" in of(instruction="4 UTCHMMA")
    assert "no tensor-core" in of(instruction="")
    assert "8 TMA stores" in of(stores=8)
    assert of(name="backward/bf16/plain", stores=8) == ""
    assert of(arch="sm_90a", instruction="16 HGMMA") == ""


def test_check_wants_the_instruction_of_the_architecture():
    def of(arch, instruction):
        return check(Compiled(arch, "forward/bf16/plain", "", 200, 0, instruction, 0))

    for row in architectures.ROWS:
        assert of(row.target, f"4 {row.matrix_instruction}") == ""
        assert f"no {row.instruction_kind} matrix instruction, only 4 IMMA" in of(row.target, "4 IMMA")
    assert "no warpgroup" in of("sm_90a", "128 HMMA")


@pytest.mark.blackwell
def test_an_architecture_that_is_not_enabled_compiles():
    """sm_120: what keeps calls from it is that nothing has run there."""
    variants = [ahead_of_time.Variant(kernel, EpilogueFlags()) for kernel in ("forward", "exp", "backward")]
    compiled = ahead_of_time.compile_architecture("sm_120a", variants, jobs=1)
    assert [kernel.error for kernel in compiled] == ["", "", ""]
    assert all(kernel.matrix_instruction.endswith(" HMMA") for kernel in compiled)
    assert architectures.of((12, 0)) is None


@pytest.fixture
def asked_for(monkeypatch):
    """The epilogues that calls ask for, on the torch engine as on the CuTe engine: (kernel, flags)."""
    from liger_cutedsl.engines import torch_engine

    found = set()

    def recording(kernel, epilogue):
        def recorded(flags, *rest):
            found.add((kernel, flags))
            return epilogue(flags, *rest)

        return recorded

    for kernel in ("forward", "exp", "backward"):
        name = f"{kernel}_epilogue"
        monkeypatch.setattr(torch_engine, name, recording(kernel, getattr(torch_engine, name)))
    return found


def calls_of_every_operator():
    """Functions of (x, weight, target, options of logits, settings), each with another set of options, backward too."""
    import torch

    flags = lambda *names: ({n: n in chosen for n in names} for chosen in subsets(names))  # noqa: E731

    def subsets(names):
        return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))

    def loss(x, weight, target, logits, call, options):
        found = liger_cutedsl.fused_linear_cross_entropy(x, weight, target, **options, **logits, **call)
        (found if isinstance(found, torch.Tensor) else found.loss).backward()

    def log_probs(x, weight, target, logits, call, options, used):
        found = liger_cutedsl.fused_linear_log_probs(x, weight, target, **options, **logits, **call)
        found = found if isinstance(found, tuple) else (found, None)
        sum(value.sum() for value, use in zip(found, used, strict=False) if use and value is not None).backward()

    def row_loss(x, weight, target, logits, call, reads, differentiated):
        def of_rows(values):
            total = -values.log_prob
            for name in reads:
                value = getattr(values, name).float()
                total = total + (value if name in differentiated else value.detach())
            return total

        liger_cutedsl.fused_linear_loss(x, weight, target, of_rows, **logits, **call).backward()

    for weighted, smoothing in ((None, 0.0), (None, 0.1), (torch.ones(40), 0.0), (torch.ones(40), 0.1)):
        for options in flags("return_predicted_tokens", "use_token_scaling"):
            yield partial(loss, options=options | dict(ce_weight=weighted, label_smoothing=smoothing))
    for options in flags("return_entropy", "return_log_sum_sq_probs", "return_mean_logits", "return_is_top1"):
        for used in ((True, True), (True, False))[: 1 + options["return_entropy"]]:
            yield partial(log_probs, options=options, used=used)
    for reads in subsets(("entropy", "mean_logit", "argmax")):
        for differentiated in subsets([name for name in reads if name != "argmax"]):
            yield partial(row_loss, reads=reads, differentiated=differentiated)


def test_every_kernel_that_a_call_can_ask_for_is_made_ahead_of_time(asked_for):
    """And no other: any options of any operator, by either schedule, with exponentials kept and without."""
    import torch

    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    target = torch.tensor([0, 3, -100, 39, 7, 11])
    calls = [dict(schedule="recompute", workspace_mb=mb) for mb in (1e-6, 100)] + [{}]
    logits = itertools.product((None, torch.zeros(40)), (None, 5.0), (1.0, 0.7))
    for (bias, softcap, temperature), call in itertools.product(logits, calls):
        options = dict(bias=bias, softcap=softcap, temperature=temperature)
        for operator in calls_of_every_operator():
            operator(x, weight, target, options, call)
    made = kernel_variants.all_variants()
    made.remove(kernel_variants.DW_SUM)  # which is no pass over logits: see test_two_part_sum.py
    assert {(variant.kernel, variant.flags) for variant in made} == asked_for
    per_kernel = {"forward": 4, "exp": 4, "backward": 2}  # two dtypes, and whether the last tile is full
    counted = Counter((variant.kernel, variant.flags) for variant in made)
    assert all(count == per_kernel[kernel] for (kernel, _), count in counted.items())
    assert set(kernel_variants.typical_variants()) <= {*made, kernel_variants.DW_SUM}
    assert len(kernel_variants.typical_variants()) <= 20


def test_compile_of_one_dtype(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        ahead_of_time, "compile_architecture", lambda arch, variants, jobs: asked.extend(variants) or []
    )
    assert main(["compile", "--arch", "sm_90a", "--dtype", "bf16"]) == 0
    assert {variant.dtype for variant in asked} == {"bf16"} and len(asked) == (
        len(kernel_variants.all_variants()) + 1
    ) / 2


def test_a_forward_alone_takes_some_rows_at_a_time(monkeypatch):
    """Llama 3 8B's head: half the partial results at N = 8192, the same at 32768 as at 4096; and all rows at once where
    slices would leave a GPU's last waves empty, or where there is little to save."""
    import torch

    from liger_cutedsl.call import Problem, WantedGradients
    from liger_cutedsl.engines import cute_engine
    from liger_cutedsl.options import LogProbOptions
    from liger_cutedsl.route import Settings
    from liger_cutedsl.schedules import recompute
    from liger_cutedsl.schedules.schedule import Task

    row = architectures.of((9, 0))
    monkeypatch.setattr(cute_engine, "architecture_of", lambda _: row)
    monkeypatch.setattr(cute_engine, "multiprocessors", lambda _: 132)
    cute_engine._wave_model.cache_clear()
    engine = cute_engine.CuteEngine()

    def plan(tokens, vocab, *wanted, **options):
        kind = dict(dtype=torch.bfloat16, device="meta")
        problem = Problem(
            torch.empty(tokens, 4096, **kind),
            torch.empty(vocab, 4096, **kind),
            torch.empty(tokens, dtype=torch.int64, device="meta"),
            options=LogProbOptions(**options),
            dense=True,
        )
        return recompute.plan(engine, Task(problem, WantedGradients(*wanted), Settings()), "")

    tiles = -(-128256 // row.tile("forward").tile_n)
    sliced = plan(8192, 128256, return_entropy=True)
    assert sliced.chunk == 4096 and sliced.workspace_bytes == 4096 * tiles * 4 * 3
    assert "4096 tokens at a time" in str(sliced)
    assert plan(32768, 128256, return_entropy=True).workspace_bytes == sliced.workspace_bytes
    assert plan(4096, 128256, return_entropy=True).chunk == 0
    assert plan(8192, 32000).chunk == 0, "6 MiB"
    wide = plan(8192, 128256, torch.bfloat16, torch.bfloat16, return_entropy=True)
    assert wide.chunk == 0, "backward takes more anyway"
    model = cute_engine._wave_model(torch.device("meta"), row.tile("forward"))
    for tokens in (4097, 6000, 8200, 12288, 20000):
        for vocab in (1000, 20000, 128256):
            rows = model.forward_rows(tokens, vocab)
            assert rows == tokens or rows % 4096 == 0
            waves = sum(model._waves(min(rows, tokens - start), vocab, 128, 192) for start in range(0, tokens, rows))
            assert row.tile("forward").tile_m != 128 or waves <= 1.01 * model._waves(tokens, vocab, 128, 192)
    cute_engine._wave_model.cache_clear()


def test_planning_takes_a_row_s_calibration(monkeypatch):
    import torch

    from liger_cutedsl.call import Problem
    from liger_cutedsl.engines import cute_engine
    from liger_cutedsl.tiling import H200

    def planned(calibration):
        row = replace(architectures.of((9, 0)), calibration=calibration)
        monkeypatch.setattr(cute_engine, "architecture_of", lambda _: row)
        cute_engine._wave_model.cache_clear()
        return engine.chunk_size(problem, 1920), engine.tile_width(problem, 13056, 0)

    problem = Problem(
        torch.empty(8192, 3584, dtype=torch.bfloat16, device="meta"),
        torch.empty(152064, 3584, dtype=torch.bfloat16, device="meta"),
        torch.empty(8192, dtype=torch.int64, device="meta"),
    )
    engine = cute_engine.CuteEngine()
    monkeypatch.setattr(cute_engine, "multiprocessors", lambda _: 132)
    chunk, width = planned(H200)
    assert planned(replace(H200, per_byte=0, dw_pass_tokens=0))[0] != chunk
    assert planned(replace(H200, weight_tile_m=384))[1] != width
    cute_engine._wave_model.cache_clear()


def test_argmax_keys_are_read_as_they_are_written():
    """OnlineArgmax writes a value's ordered bits over its column; decoded() reads the largest value, first column."""
    import torch

    from liger_cutedsl.engines.cute_ops import OnlineArgmax

    values = torch.tensor([[-3.5, 7.0, 7.0], [-1e30, -2.0, -torch.inf], [0.0, -1.0, -1e-38]])
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    columns = torch.tensor([[5, 200, 300], [1, 129, 257], [64, 3, 2]])
    largest, column = OnlineArgmax.decoded((ordered << 32) | (0xFFFFFFFF - columns))
    assert largest.tolist() == [7.0, -2.0, 0.0]
    assert column.tolist() == [200, 129, 64]


@pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(arch, marks=pytest.mark.blackwell) for arch in ("sm_103a", "sm_120a"))]
)
@pytest.mark.parametrize(
    "kernel", ["exp", *(pytest.param(kernel, marks=pytest.mark.blackwell) for kernel in ("forward", "backward"))]
)
def test_every_element_of_a_blackwell_tile_has_one_owner(arch, kernel):
    probe = Path(__file__).parent / "layout_probe.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", probe, arch, f"{kernel}/bf16/plain"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    layout = json.loads(done.stdout.splitlines()[-1])
    rows, columns = layout["tile"]
    # each CTA of a pair holds half of the 256 × 256 tile; sm_120 has no pairs
    assert (rows, columns) == ((128, 128) if arch == "sm_120a" else (128, 256))
    held = [tuple(element) for thread in layout["held"] for element in thread]
    assert len(held) == rows * columns
    assert set(held) == set(itertools.product(range(rows), range(columns)))
    for elements, computed in zip(layout["held"], layout["columns"], strict=True):
        assert [column for _, column in elements] == computed


def cached_kernels(folder, arch, *dtypes, path="") -> dict:
    """What kernel_identity_probe.py finds in a cache folder after one process: {(dtype, with headroom): file}."""
    probe = Path(__file__).parent / "kernel_identity_probe.py"
    environment = {**os.environ, "QUACK_CACHE_DIR": str(folder), "PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "ignore", probe, arch, *dtypes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    return {(dtype, headroom == "True"): file for dtype, headroom, file in rows}


BOTH = {("bf16", False), ("fp16", True)}  # (dtype, whether its exponentials carry float16's headroom)


@pytest.fixture(scope="module")
def bf16_then_fp16(tmp_path_factory):
    return cached_kernels(tmp_path_factory.mktemp("order"), "sm_90a", "bf16", "fp16")


def test_each_dtype_has_a_kernel_with_its_own_constants(bf16_then_fp16, tmp_path):
    """The headroom is a value in the epilogue's closure alone: the first dtype's kernel must not serve the second."""
    assert set(bf16_then_fp16) == BOTH
    assert cached_kernels(tmp_path, "sm_90a", "fp16", "bf16") == bf16_then_fp16


def test_compile_and_later_processes_share_kernels_but_not_those_of_another_dtype(tmp_path, monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "compiled"))
    variants = [ahead_of_time.Variant("exp", EpilogueFlags(), dtype) for dtype in ("bf16", "fp16")]
    compiled = ahead_of_time.compile_architecture("sm_100a", variants, jobs=1)
    assert not any(kernel.error for kernel in compiled)
    found = cached_kernels(tmp_path / "compiled", "sm_100a")
    assert set(found) == BOTH
    assert set(cached_kernels(tmp_path / "kernels", "sm_100a", "fp16")) == {("fp16", True)}
    assert cached_kernels(tmp_path / "kernels", "sm_100a", "bf16") == found


def test_a_kernel_of_other_sources_is_not_found_again(bf16_then_fp16, tmp_path):
    # an upgrade, installed where quack knows functions by their names alone
    upgraded = tmp_path / "site-packages"
    shutil.copytree(Path(liger_cutedsl.__file__).parent, upgraded / "liger_cutedsl")
    formulas = upgraded / "liger_cutedsl" / "epilogues.py"
    formulas.write_text(formulas.read_text() + "\n# another formula\n")
    old = bf16_then_fp16["bf16", False]
    new = cached_kernels(tmp_path / "kernels", "sm_90a", "bf16", path=upgraded)["bf16", False]
    assert old.split("/")[0] != new.split("/")[0]  # the folder: a hash of all sources
    assert old.split("/")[1] != new.split("/")[1]  # the file: a hash of the epilogue


def test_an_epilogue_cannot_close_over_what_its_identity_does_not_show():
    from liger_cutedsl.epilogue_identity import with_operands

    def epilogue_over(value):
        return with_operands(lambda acc: {"D": acc * value}, ())

    assert epilogue_over(1.0).__qualname__ != epilogue_over(2.0).__qualname__
    assert epilogue_over(1.0).__qualname__ == epilogue_over(1.0).__qualname__
    with pytest.raises(TypeError, match="may close over"):
        epilogue_over(object())
