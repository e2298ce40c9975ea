"""Liger-Kernel on our operator: what enable() and disable() change, and what they leave alone."""

import copy
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import liger_cutedsl
from liger_cutedsl import LossOptions
from liger_cutedsl.liger import operators
from reference import assert_close, reference
from stacks import ONLY_THE_LOSS, SMALL, count_calls

X = torch.randn(20, 16)
W = torch.randn(50, 16)
T = torch.randint(0, 50, (20,))
FLOAT32 = 1e-5


def leaves():
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def check(loss, x, w, **options):
    loss.backward()
    expected, grads = reference(X, W, T, None, None, LossOptions(**options))
    assert_close(loss, expected["loss"], FLOAT32, "loss")
    assert_close(x.grad, grads[0], FLOAT32, "dx")
    assert_close(w.grad, grads[1], FLOAT32, "dW")


def test_module(enabled):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x, w = leaves()
    module = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, softcap=5.0, return_token_accuracy=True)
    out = module(w, x, T)
    assert out.token_accuracy is not None and out.z_loss is None
    check(out.loss, x, w, label_smoothing=0.1, softcap=5.0)


def test_functional(enabled):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    x, w = leaves()
    check(liger_fused_linear_cross_entropy(x, w, T, reduction="sum", chunk_mem_const=4), x, w, reduction="sum")


@pytest.mark.parametrize("name", ["nvidia-cutedsl", "cutedsl", None])
def test_second_dispatcher(enabled, name):
    from liger_kernel.functional import fused_linear_cross_entropy

    x, w = leaves()
    check(fused_linear_cross_entropy(x, w, T, impl=name)[0], x, w)


def test_second_dispatcher_refuses_an_unknown_mode(enabled):
    from liger_kernel.functional import fused_linear_cross_entropy

    with pytest.raises(ValueError, match="mode must be None or 'default'"):
        fused_linear_cross_entropy(X, W, T, impl="nvidia-cutedsl", mode="fast")


def test_forward_and_backward_functions():
    from liger_cutedsl.liger.operators import (
        fused_linear_cross_entropy_backward,
        fused_linear_cross_entropy_forward,
    )

    x, w = leaves()
    bias = torch.randn(50)
    loss, z_loss, accuracy, predicted, gx, gw, gb = fused_linear_cross_entropy_forward(
        x, w, T, bias=bias, return_z_loss=True, lse_square_scale=0.01
    )
    expected, grads = reference(X, W, T, bias, None, LossOptions(lse_square_scale=0.01))
    assert_close(loss, expected["loss"], FLOAT32, "loss")
    assert_close(z_loss, expected["z_loss"], FLOAT32, "z_loss")
    assert accuracy is None and predicted is None
    scaled = fused_linear_cross_entropy_backward(torch.tensor(3.0), gx, gw, gb)
    for once, tripled, want in zip((gx, gw, gb), scaled, grads, strict=True):
        assert_close(once, want, FLOAT32, "gradient")
        assert_close(tripled, 3 * want, FLOAT32, "scaled gradient")
    x_only = fused_linear_cross_entropy_forward(x, w, T, weight_requires_grad=False)
    assert x_only[5] is None and x_only[4] is not None
    assert fused_linear_cross_entropy_forward(X, W, T)[4] is None
    upstream = torch.linspace(0, 1, 20)
    gw = fused_linear_cross_entropy_forward(x, w, T, reduction="none", token_grad_output=upstream)[5]
    assert_close(gw, reference(X, W, T, None, None, LossOptions(reduction="none"), upstream)[1][1], 1e-5, "dW")


def test_disable_restores_liger():
    import liger_kernel.transformers.functional as functional
    from liger_kernel.backends import all_impls, available_impls

    import liger_kernel.ops

    op = "fused_linear_cross_entropy"
    before = (liger_kernel.ops.LigerFusedLinearCrossEntropyFunction, available_impls(op), all_impls(op))
    liger_cutedsl.enable()
    liger_cutedsl.enable()
    ours = liger_cutedsl.LigerFusedLinearCrossEntropyFunction
    assert liger_kernel.ops.LigerFusedLinearCrossEntropyFunction is ours
    assert functional.LigerFusedLinearCrossEntropyFunction is ours
    assert liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction is not ours
    assert available_impls(op)[0] == "nvidia-cutedsl"
    liger_cutedsl.disable()
    liger_cutedsl.disable()
    after = (liger_kernel.ops.LigerFusedLinearCrossEntropyFunction, available_impls(op), all_impls(op))
    assert before == after
    assert functional.LigerFusedLinearCrossEntropyFunction is before[0]


NAMES = ("LigerFusedLinearCrossEntropyFunction", "fused_linear_cross_entropy_forward")


class LazyModule(types.ModuleType):
    """A module that is loaded by whatever looks at it, as importlib.util.LazyLoader's and others are."""

    def __getattribute__(self, name):
        raise AssertionError(f"enable() looked up {name} of a module that loads itself then")


@pytest.fixture
def modules(monkeypatch):
    """Makes modules as other people's code would hold the operator in."""

    def make(name, kind=types.ModuleType, **names):
        module = kind(name)
        object.__getattribute__(module, "__dict__").update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    yield make
    liger_cutedsl.disable()


def test_enable_rebinds_whatever_is_bound_to_the_operator(modules, monkeypatch):
    import liger_kernel.ops as ops

    stock = [getattr(ops, name) for name in NAMES]
    ours = [getattr(operators, name) for name in NAMES]
    assert not {*stock} & {*ours}
    held = dict(Theirs=stock[0], forward=stock[1], other=sys)
    user, below = modules("somebodys_trainer", **held), modules("somebodys.trainer.loss", again=stock[0], **held)
    mine = modules("compares_both", Ours=ours[0], Theirs=stock[0])
    monkeypatch.setattr(sys.modules["__main__"], "imported_by_name", stock[0], raising=False)
    modules("somebodys.lazy_module", LazyModule)
    modules("not_even_a_module", lambda name: types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "no_module_at_all", None)

    liger_cutedsl.enable()
    for module in (user, below):
        assert [module.Theirs, module.forward, module.other] == [*ours, sys]
    assert below.again is mine.Theirs is sys.modules["__main__"].imported_by_name is ours[0]
    assert ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction is stock[0], "our fallback calls it"
    later = modules("imported_afterwards", Theirs=ops.LigerFusedLinearCrossEntropyFunction)
    liger_cutedsl.disable()
    for module in (user, below):
        assert [module.Theirs, module.forward, module.other] == [*stock, sys]
    assert below.again is mine.Theirs is later.Theirs is sys.modules["__main__"].imported_by_name is stock[0]
    assert mine.Ours is ours[0], "what was ours before enable() is not Liger's"
    assert (
        liger_cutedsl.LigerFusedLinearCrossEntropyFunction is operators.LigerFusedLinearCrossEntropyFunction is ours[0]
    )


DISPATCHED_FIRST = """
import sys, torch
from liger_kernel.functional import fused_linear_cross_entropy
assert "liger_kernel.ops" not in sys.modules
x, weight, target = torch.randn(5, 16), torch.randn(20, 16), torch.arange(5)
by_name = dict(impl="nvidia-cutedsl") if IMPL is None else {}
loss = fused_linear_cross_entropy(x, weight, target, **by_name)[0]
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ weight.T, target))
from liger_kernel.backends import all_impls, available_impls, resolve_impl
print(resolve_impl("fused_linear_cross_entropy", "nvidia-cutedsl").forward.__module__)
print(*all_impls("fused_linear_cross_entropy"), available_impls("fused_linear_cross_entropy")[0])
"""


@pytest.mark.parametrize("variable", ["cutedsl", None])
def test_liger_finds_us_where_its_second_dispatcher_is_called_first(variable):
    """liger_kernel.functional called before anything imports liger_kernel.ops."""
    environment = {name: value for name, value in os.environ.items() if name != "LIGER_KERNEL_IMPL"}
    environment |= dict(LIGER_KERNEL_IMPL=variable) if variable else {}
    code = f"IMPL = {variable!r}\n{DISPATCHED_FIRST}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, names = done.stdout.splitlines()
    assert first == "liger_cutedsl.liger.dispatch"
    *names, automatic = names.split()
    assert names == ["nvidia-cutedsl", "nvidia-cutedsl-stock", "nvidia-triton"] and automatic != "nvidia-cutedsl"


PRETENDED_GPUS = """
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: len(GPUS)
torch.cuda.get_device_capability = lambda index=0: GPUS[index]
import liger_kernel.ops as ops
for name in ("FusedLinearCrossEntropy", "RMSNorm", "Rope", "SiLUMul", "CrossEntropy", "GELUMul"):
    print(getattr(ops, f"Liger{name}Function").__module__)
"""


@pytest.mark.parametrize("gpus,run", [([(8, 9)], False), ([(9, 0), (8, 0)], False), ([(9, 0), (10, 0)], True)])
def test_ligers_other_operators_come_along_only_where_they_run(gpus, run):
    """LIGER_KERNEL_IMPL=cutedsl brings Liger's CuTe RMSNorm, RoPE, …, which no GPU before Hopper runs."""
    pytest.importorskip("cutlass")
    environment = {**os.environ, "LIGER_KERNEL_IMPL": "cutedsl"}
    code = f"GPUS = {gpus}\n{PRETENDED_GPUS}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    loss, *others, gelu = done.stdout.split()
    assert loss == "liger_cutedsl.api" and gelu == "liger_kernel.ops.geglu"
    assert [name.startswith("liger_kernel.ops.cutedsl.") for name in others] == [run] * 4, others


def test_ligers_other_operators_stay_where_cute_dsl_is_broken(monkeypatch):
    monkeypatch.setattr(operators, "_stock_obstacle", lambda: None)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cutedsl.ops", types.ModuleType("without __all__"))
    monkeypatch.setattr("liger_kernel.ops.cutedsl.ops", types.ModuleType("without __all__"), raising=False)
    assert operators._stock_operators() == {}


WITHOUT_LIGER = """
import sys
for name in ("liger_kernel", "triton", "quack", "cutlass"):
    sys.modules[name] = None
import torch, liger_cutedsl
from importlib import metadata
version = metadata.version
def without_liger(package):
    if package == "liger-kernel":
        raise metadata.PackageNotFoundError(package)
    return version(package)
metadata.version = without_liger
x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(20, 16, requires_grad=True)
loss = liger_cutedsl.fused_linear_cross_entropy(x, weight, torch.arange(5))
expected = torch.nn.functional.cross_entropy(x @ weight.T, torch.arange(5))
torch.testing.assert_close(loss, expected)
for got, want in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight))):
    torch.testing.assert_close(got, want)
liger_cutedsl.disable()
try:
    liger_cutedsl.enable()
except ImportError as error:
    print(error)
try:
    import liger_cutedsl.liger.dispatch
except ImportError as error:
    print(error)
from liger_cutedsl.__main__ import main
main([])
"""


def test_a_machine_without_liger_runs_all_but_what_is_for_liger():
    """As a Mac, which has no triton and so no Liger-Kernel."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIGER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    enable, dispatch, *report = done.stdout.splitlines()
    assert "enable() needs liger-kernel 0.8.4 or later, and found none: pip install liger-kernel" in enable
    assert "liger_kernel" in dispatch
    assert "  not installed: this package runs without it" in report


@pytest.mark.parametrize("through", ["keywords", "Liger's class"])
def test_numpy_scalars_are_options(through):
    """As stock Liger takes them, from a config that numpy made."""
    options = dict(label_smoothing=np.float32(0.125), softcap=np.float64(5.0), lse_square_scale=np.float16(0.25))
    options |= dict(ignore_index=np.int64(7), return_z_loss=np.bool_(True), reduction=np.str_("sum"))
    x, w = leaves()
    if through == "keywords":
        out = liger_cutedsl.fused_linear_cross_entropy(x, w, T, **options)
    else:
        o = options
        values = [
            None,
            None,
            o["ignore_index"],
            o["lse_square_scale"],
            o["label_smoothing"],
            o["reduction"],
            o["softcap"],
        ]
        values += [o["return_z_loss"], None, np.bool_(False), False, False, None, None, np.int32(2)]
        out = liger_cutedsl.LossOutput(*liger_cutedsl.LigerFusedLinearCrossEntropyFunction.apply(x, w, T, *values))
    assert out.z_loss is not None
    plain = {name: value.item() for name, value in options.items()}
    assert type(LossOptions(**options).label_smoothing) is float and LossOptions(**options) == LossOptions(**plain)
    check(out.loss, x, w, **plain)


def test_numpy_scalars_under_torch_compile():
    """They are tensors there: the call runs between two graphs, or says so where there may be one graph only."""

    def loss(x, w):
        return liger_cutedsl.fused_linear_cross_entropy(2 * x, w, T, softcap=np.float32(5.0), reduction="sum") / 2

    x, w = leaves()
    torch._dynamo.reset()
    found = torch.compile(loss)(x, w)
    found.backward()
    a, b = leaves()
    logits = 5 * torch.tanh(2 * a @ b.T / 5)
    want = torch.nn.functional.cross_entropy(logits, T, reduction="sum") / 2
    want.backward()
    assert_close(found, want, FLOAT32, "loss")
    assert_close(x.grad, a.grad, FLOAT32, "dx")
    assert_close(w.grad, b.grad, FLOAT32, "dW")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="softcap must be a Python number"):
        torch.compile(loss, fullgraph=True)(x, w)


@pytest.mark.parametrize(
    "option,value",
    [
        ("softcap", np.bool_(True)),
        ("ignore_index", np.float32(1.0)),
        ("ignore_index", np.bool_(True)),
        ("label_smoothing", np.float32("nan")),
        ("label_smoothing", np.array(0.1)),
        ("label_smoothing", torch.tensor(0.1)),
        ("lse_square_scale", np.complex64(1)),
        ("return_z_loss", np.int64(1)),
    ],
)
def test_what_is_not_that_number_is_refused_from_numpy_too(option, value):
    with pytest.raises(TypeError, match=option):
        liger_cutedsl.fused_linear_cross_entropy(X, W, T, **{option: value})


SIZES = dict(**SMALL, vocab_size=1000, pad_token_id=0)
# family → (transformers' class prefix, what is particular about its head)
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", dict(final_logit_softcapping=5.0, tie_word_embeddings=True)),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
}


@pytest.mark.parametrize("num_items", [None, 17])
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_hugging_face_models(enabled, family, num_items):
    """A model patched by Liger (on a CPU only its loss) has the loss and the gradients of the unpatched one."""
    import inspect

    import liger_kernel.transformers as patches
    import transformers

    prefix, particular = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **particular)
    plain = getattr(transformers, f"{prefix}ForCausalLM")(config)
    fused = copy.deepcopy(plain)
    patch = getattr(patches, f"apply_liger_kernel_to_{family}")
    flags = [p for p in inspect.signature(patch).parameters if p != "model"]
    patch(**{flag: flag == "fused_linear_cross_entropy" for flag in flags}, model=fused)
    ids = torch.randint(1, 1000, (2, 17))
    labels = ids.clone()
    labels[0, :5] = -100
    extra = {} if num_items is None else dict(num_items_in_batch=torch.tensor(num_items))
    with count_calls() as calls:
        losses = [model(input_ids=ids, labels=labels, **extra).loss for model in (plain, fused)]
    assert calls == [1], "the patched model, and only it, runs our operator"
    for loss in losses:
        loss.backward()
    assert_close(losses[1], losses[0].double(), FLOAT32, "loss")
    for (name, a), b in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert_close(b.grad, a.grad, FLOAT32, name)


def test_a_patched_model_compiles_into_one_graph(enabled):
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    apply_liger_kernel_to_llama(**ONLY_THE_LOSS, model=model)
    ids = torch.randint(1, 1000, (2, 17))
    # return_dict: else Liger's forward reads an option that makes transformers log, which breaks the graph
    call = dict(input_ids=ids, labels=ids, return_dict=True)
    expected = model(**call).loss
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**call).loss
    assert_close(loss, expected.double(), FLOAT32, "loss")
    want = torch.autograd.grad(expected, model.lm_head.weight)[0]
    assert_close(torch.autograd.grad(loss, model.lm_head.weight)[0], want, FLOAT32, "dW")
