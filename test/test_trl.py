"""TRL's fused head on our operator, argument for argument, on the CPU with the torch engine forced."""

import contextlib
import importlib
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import liger_cutedsl
from liger_cutedsl import routing, rows, testing, torch_compile_log_probs
from liger_cutedsl.liger import drop_in, trl
from liger_cutedsl.liger.trl import OPTIONAL_OUTPUTS, Problem
from liger_cutedsl.replaced import settings_within
from liger_cutedsl.route import Settings
from per_token import FLOAT32, error, in_float64, largest_error, peak_of, reference

kernels = pytest.importorskip("trl.kernels", reason="TRL 1.15 or later is not installed")
HOME = importlib.import_module(trl.HOME)
TOKENS, HIDDEN, VOCAB, CHUNK = 64, 32, 128, 32
trls_on_a_cpu = pytest.mark.skipif(
    not hasattr(HOME, "_use_triton"), reason="TRL's own head runs on a CPU from TRL 1.16 on"
)


@pytest.fixture
def ours(enabled, monkeypatch):
    """TRL's name, which means our class, and an engine that runs here."""
    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", "torch")
    assert kernels.ChunkedLogProbFunction is trl.ChunkedLogProbFunction
    return kernels.ChunkedLogProbFunction


def inputs(dtype=torch.float32, bias=False, weight_dtype=None, tokens=TOKENS):
    g = torch.Generator().manual_seed(42)
    x, w = torch.randn(tokens, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)
    b = torch.randn(VOCAB, generator=g) if bias else None
    target = torch.randint(0, VOCAB, (tokens,), generator=g)
    w = w.to(weight_dtype or dtype)
    leaves = [None if t is None else t.requires_grad_() for t in (x.to(dtype), w, None if b is None else b.to(dtype))]
    return *leaves, target


def loss_of(log_probs, entropy):
    return (2.0 * log_probs + 0.5 * entropy).sum()


def gradients(*leaves):
    return [leaf.grad for leaf in leaves if leaf is not None]


CASES = {
    "plain": {},
    "int_temperature": dict(temperature=2),
    "softcap": dict(softcap=5.0, temperature=0.7),
    "scale": dict(logit_scale=0.5),
    "all": dict(softcap=5.0, temperature=0.7, logit_scale=-0.5),
    "scale_of_zero": dict(logit_scale=0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(ours, case, bias, dtype):
    x, w, b, target = inputs(dtype, bias)
    options = dict(temperature=1.0, softcap=None, logit_scale=1.0) | CASES[case]
    found = ours.apply(x, w, b, target, options["temperature"], CHUNK, options["softcap"], options["logit_scale"])
    assert isinstance(found, tuple) and len(found) == 5
    assert [v.dtype for v in found] == [torch.float32] * 4 + [torch.bool]
    assert [v.requires_grad for v in found] == [True, True, False, False, False]
    loss_of(*found[:2]).backward()
    x64, w64, b64 = in_float64(x, w, b)
    want = reference(x64, w64, target, b64, **options)
    size = float(torch.nn.functional.linear(x64, w64, b64).detach().abs().max()) / options["temperature"]
    for got, expected in zip(found[:4], want[:4], strict=True):
        assert largest_error(got, expected) <= FLOAT32 * max(size, 1.0)
    assert torch.equal(found[4], want.is_top1)
    loss_of(*want[:2]).backward()
    for got, expected in zip(gradients(x, w, b), gradients(x64, w64, b64), strict=True):
        assert got.dtype == dtype and largest_error(got, expected) <= FLOAT32 * max(size, 1.0) * expected.abs().max()


@pytest.mark.parametrize("upstream", ["log_probs", "entropy", "both"])
def test_a_result_that_no_loss_uses_adds_nothing(ours, upstream):
    """Its upstream gradient is None, not zeros: an entropy that is only logged costs no gradient of its own."""
    x, w, _, target = inputs()
    log_probs, entropy, *_ = ours.apply(x, w, None, target, 0.7, CHUNK)
    used = dict(log_probs=log_probs, entropy=entropy)
    chosen = used if upstream == "both" else {upstream: used[upstream]}
    sum(v.sum() for v in chosen.values()).backward()
    x64, w64 = in_float64(x, w)
    want = reference(x64, w64, target, temperature=0.7)
    sum(getattr(want, name).sum() for name in chosen).backward()
    assert error(x.grad, x64.grad) <= FLOAT32 * 30 and error(w.grad, w64.grad) <= FLOAT32 * 30


@pytest.mark.parametrize("trained", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 0, 0)])
def test_frozen_inputs_get_no_gradient(ours, trained):
    x, w, b, target = inputs(bias=True)
    for leaf, flag in zip((x, w, b), trained, strict=True):
        leaf.requires_grad_(bool(flag))
    log_probs, *_ = ours.apply(x, w, b, target, 1.0, CHUNK)
    assert log_probs.requires_grad == any(trained)
    if not any(trained):
        return
    log_probs.sum().backward()
    x64, w64, b64 = in_float64(x, w, b)
    reference(x64, w64, target, b64).log_probs.sum().backward()
    for leaf, leaf64, flag in zip((x, w, b), (x64, w64, b64), trained, strict=True):
        assert (leaf.grad is not None) == bool(flag)
        assert not flag or error(leaf.grad, leaf64.grad) <= FLOAT32 * 30


def test_top1_is_the_first_of_equal_logits(ours):
    x, w, _, _ = inputs()
    with torch.no_grad():
        w[VOCAB // 2 :] = w[: VOCAB // 2]
    first = (x @ w.T).argmax(-1)
    assert (first < VOCAB // 2).all()
    target = torch.where(torch.arange(TOKENS) % 2 == 0, first, first + VOCAB // 2)
    found = ours.apply(x, w, None, target, 1.0, CHUNK)
    assert torch.equal(found[4], torch.arange(TOKENS) % 2 == 0)


@pytest.mark.parametrize("asked", [(), ("entropy",), ("is_top1", "log_probs"), ("log_probs",)])
def test_what_outputs_does_not_name_is_none(ours, asked):
    x, w, _, target = inputs()
    found = ours.apply(x, w, None, target, 1.0, CHUNK, None, 1.0, asked)
    assert found[0] is not None
    assert [v is not None for v in found[1:]] == [name in asked for name in OPTIONAL_OUTPUTS]


def test_no_tokens(ours):
    """DDP waits for a gradient of each parameter: zeros, not None."""
    x, w, b, target = inputs(bias=True, tokens=0)
    found = ours.apply(x, w, b, target, 0.7, CHUNK)
    assert [tuple(v.shape) for v in found] == [(0,)] * 5
    loss_of(*found[:2]).backward()
    for leaf in (x, w, b):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


# Four of TRL's own tests compare bfloat16 with logits that were rounded to it. With exact ones instead: ours is no
# further away than TRL's.
BFLOAT16 = {
    "T=1": dict(),
    "T=0.7": dict(temperature=0.7),
    "float32_weight": dict(weight_dtype=torch.float32),
    "bias": dict(bias=True, temperature=0.7),
}


@trls_on_a_cpu
@pytest.mark.parametrize("case", BFLOAT16)
def test_bfloat16_is_no_further_from_float64_than_trls(ours, case):
    options = dict(BFLOAT16[case])
    temperature = options.pop("temperature", 1.0)
    errors = []
    for head in (ours, HOME.ChunkedLogProbFunction):
        x, w, b, target = inputs(torch.bfloat16, **options)
        log_probs, entropy, *_ = head.apply(x, w, b, target, temperature, CHUNK)
        loss_of(log_probs, entropy).backward()
        x64, w64, b64 = in_float64(x, w.bfloat16(), b)  # what the contract multiplies
        want = reference(x64, w64, target, b64, temperature=temperature)
        loss_of(*want[:2]).backward()
        assert [leaf.grad.dtype for leaf in (x, w)] == [torch.bfloat16, options.get("weight_dtype", torch.bfloat16)]
        errors.append([largest_error(log_probs, want.log_probs), largest_error(entropy, want.entropy)])
        errors[-1] += [error(*pair) for pair in zip(gradients(x, w, b), gradients(x64, w64, b64), strict=True)]
    for mine, theirs in zip(*errors, strict=True):
        assert mine <= theirs, errors
    assert errors[0][0] < errors[1][0] / 10 and errors[0][0] <= 1e-4, errors


@pytest.mark.parametrize("kind", ["autocast", "bfloat16 before float32"])
def test_the_weight_itself_is_multiplied_and_saved(ours, kind):
    """ZeRO-3 gathers it again, and a cast of the whole would be a copy that TRL does not make."""
    x, w, _, target = inputs(torch.float32 if kind == "autocast" else torch.bfloat16, weight_dtype=torch.float32)
    with (
        mock.patch.object(trl, "run", wraps=trl.run) as run,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"),
    ):
        log_probs, *_ = ours.apply(x, w, None, target, 1.0, CHUNK)
    assert run.call_args.args[0].weight is w and run.call_args.args[0].x is x
    want = reference(*in_float64(x.bfloat16(), w.bfloat16()), target)
    assert largest_error(log_probs, want.log_probs) <= FLOAT32 * 60


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast(ours, kind):
    """TRL's default: float32 parameters and hidden states, multiplied in 16 bits; backward outside of the context."""
    x, w, b, target = inputs(bias=True)
    with torch.autocast("cpu", dtype=kind):
        log_probs, entropy, *_ = ours.apply(x, w, b, target, 0.7, CHUNK)
    loss_of(log_probs, entropy).backward()
    x64, w64, b64 = in_float64(*(t.to(kind) for t in (x, w, b)))
    want = reference(x64, w64, target, b64, temperature=0.7)
    loss_of(*want[:2]).backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert largest_error(log_probs, want.log_probs) <= FLOAT32 * 60
    for leaf, leaf64 in zip((x, w, b), (x64, w64, b64), strict=True):
        assert leaf.grad.dtype == torch.float32 and error(leaf.grad, leaf64.grad) <= torch.finfo(kind).eps / 2


def test_autocast_takes_the_rounded_hidden_states_for_the_weights_gradient_too(ours):
    x, w, _, target = inputs()
    x = x.detach().bfloat16().float()
    found = []
    for hidden in (x, x * (1 + 2.0**-12)):
        assert torch.equal(hidden.bfloat16(), x.bfloat16())
        leaf = w.detach().clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs, *_ = ours.apply(hidden, leaf, None, target, 1.0, CHUNK)
        log_probs.sum().backward()
        found.append((log_probs.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.float64])
def test_a_weight_of_fewer_bits_than_the_hidden_states(ours, hidden_dtype):
    """cast_lm_head_to_fp32=True: float32 hidden states before a bfloat16 weight."""
    x, w, _, target = inputs(hidden_dtype, weight_dtype=torch.bfloat16)
    log_probs, *_ = ours.apply(x, w, None, target, 1.0, CHUNK)
    log_probs.sum().backward()
    x64, w64 = in_float64(x, w)
    want = reference(x64, w64, target)
    want.log_probs.sum().backward()
    assert largest_error(log_probs, want.log_probs) <= FLOAT32 * 30
    assert x.grad.dtype == hidden_dtype and error(x.grad, x64.grad) <= FLOAT32 * 30
    assert w.grad.dtype == torch.bfloat16 and error(w.grad, w64.grad) <= torch.finfo(torch.bfloat16).eps / 2


def test_grad_scaler(ours):
    """float16 with a loss scale of 2^16: no gradient is lost below float16's smallest number."""
    x, w, _, target = inputs()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD([x, w], 1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        log_probs, *_ = ours.apply(x, w, None, target, 1.0, CHUNK)
        loss = -log_probs.mean() * 1e-4
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    x64, w64 = in_float64(x.half(), w.half())
    (-reference(x64, w64, target).log_probs.mean() * 1e-4).backward()
    for leaf, leaf64 in ((x, x64), (w, w64)):
        assert error(leaf.grad, leaf64.grad) <= torch.finfo(torch.float16).eps / 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(ours, reentrant):
    x, w, _, target = inputs()
    y, v, *_ = inputs()

    def head(hidden, weight):
        return loss_of(*ours.apply(torch.tanh(hidden), weight, None, target, 0.7, CHUNK)[:2])

    checkpoint(head, x, w, use_reentrant=reentrant).backward()
    head(y, v).backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(w.grad, v.grad)


def test_results_that_are_changed_in_place_change_no_gradient(ours):
    """Trainers mask what they were given: backward has numbers of its own."""
    x, w, _, target = inputs()
    y, v, *_ = inputs()
    found = ours.apply(x, w, None, target, 0.7, CHUNK)
    loss = loss_of(*found[:2])
    for value in found[:4]:
        value.detach().mul_(0.5)
    loss.backward()
    loss_of(*ours.apply(y, v, None, target, 0.7, CHUNK)[:2]).backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(w.grad, v.grad)


def test_two_calls_before_either_backward(ours):
    x, w, _, target = inputs()
    y, v, *_ = inputs()
    first, second = (ours.apply(x, w, None, target, t, CHUNK)[0].sum() for t in (1.0, 0.7))
    (first + second).backward()
    for t in (1.0, 0.7):
        ours.apply(y, v, None, target, t, CHUNK)[0].sum().backward()
    assert error(x.grad, y.grad) <= FLOAT32 and error(w.grad, v.grad) <= FLOAT32


@contextlib.contextmanager
def filled(parameters, values):
    """ZeRO-3's gathering: the whole parameters in place of what a rank holds of them."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    yield


def test_zero3_gathers_the_weight_again_before_backward_reads_it(ours, monkeypatch):
    """By emulation: ZeRO-3 empties a parameter in place after forward, and the context fills it."""
    utils = pytest.importorskip("trl.trainer.utils")
    x, w, b, target = inputs(bias=True)
    w, b = torch.nn.Parameter(w.detach()), torch.nn.Parameter(b.detach())
    whole, gathered = [w.data, b.data], []

    def gather(*parameters):
        gathered.append(parameters)
        return filled(parameters, whole)

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
    log_probs, entropy, *_ = ours.apply(x, w, b, target, 0.7, CHUNK)
    assert not gathered, "forward is called within the context"
    w.data, b.data = torch.empty(0), torch.empty(0)
    loss_of(log_probs, entropy).backward()
    assert len(gathered) == 1 and gathered[0][0] is w and gathered[0][1] is b
    x64, w64, b64 = in_float64(x, *whole)
    loss_of(*reference(x64, w64, target, b64, temperature=0.7)[:2]).backward()
    for leaf, leaf64 in zip((x, w, b), (x64, w64, b64), strict=True):
        assert error(leaf.grad, leaf64.grad) <= FLOAT32 * 30


def test_zero3_without_gathering_is_refused(ours, monkeypatch):
    utils = pytest.importorskip("trl.trainer.utils")
    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", lambda *_: contextlib.nullcontext())
    x, w, _, target = inputs()
    w = torch.nn.Parameter(w.detach())
    log_probs, *_ = ours.apply(x, w, None, target, 1.0, CHUNK)
    w.data = torch.empty(0)
    with pytest.raises(RuntimeError):
        log_probs.sum().backward()


def test_compiled_it_is_one_graph(ours):
    x, w, b, target = inputs(bias=True)

    def head(x, w, b, target):
        found = ours.apply(torch.tanh(x), w, b, target, 0.7, CHUNK, 5.0, 0.5)
        return loss_of(*found[:2]), found[2:]

    torch._dynamo.reset()
    loss, others = torch.compile(head, fullgraph=True)(x, w, b, target)
    loss.backward()
    x64, w64, b64 = in_float64(x, w, b)
    want = reference(torch.tanh(x64), w64, target, b64, temperature=0.7, softcap=5.0, logit_scale=0.5)
    loss_of(*want[:2]).backward()
    assert error(loss, loss_of(*want[:2])) <= FLOAT32
    for got, expected in zip(others[:2], want[2:4], strict=True):
        assert largest_error(got, expected) <= FLOAT32 * 30
    assert torch.equal(others[2], want.is_top1)
    for leaf, leaf64 in zip((x, w, b), (x64, w64, b64), strict=True):
        assert error(leaf.grad, leaf64.grad) <= FLOAT32 * 30


@trls_on_a_cpu
def test_compiled_a_cpu_call_is_trls_own(enabled):
    """In the graph too, in which TRL's kernel is one where its tiles divide the vocabulary."""
    x, w, _, target = inputs()
    y, v, *_ = inputs()

    def head(x, w, apply):
        return loss_of(*apply(torch.tanh(x), w, None, target, 0.7, VOCAB)[:2])

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: head(x, w, kernels.ChunkedLogProbFunction.apply), fullgraph=True)
    with mock.patch.object(trl, "entered_log_probs", side_effect=AssertionError("TRL's own was to run")):
        loss = compiled(x, w)
    loss.backward()
    eager = head(y, v, HOME.ChunkedLogProbFunction.apply)
    eager.backward()
    assert error(loss, eager) <= FLOAT32
    assert error(x.grad, y.grad) <= FLOAT32 * 30 and error(w.grad, v.grad) <= FLOAT32 * 30


@trls_on_a_cpu
@pytest.mark.slow
def test_trls_head_is_one_graph(ours, monkeypatch):
    """A model with TRL's fused head on it, its whole forward compiled by inductor."""
    transformers, utils = pytest.importorskip("transformers"), pytest.importorskip("trl.trainer.utils")
    from stacks import SMALL

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **SMALL))
    utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids = torch.randint(1, VOCAB, (2, 12))
    labels = ids.masked_fill(torch.arange(12) < 4, -100)

    def loss(**kwargs):
        out = model(input_ids=ids, labels=labels, fused_lm_head=True, **kwargs)
        return out.loss + 0.1 * out.entropy.sum()

    eager = loss()
    eager.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)()
    compiled.backward()
    assert error(compiled, eager) <= 1e-5
    for name, p in model.named_parameters():
        assert error(p.grad, gradients[name]) <= 1e-4, name


# What is not ours


@trls_on_a_cpu
def test_a_cpu_call_is_trls_own(enabled, caplog):
    """Without an engine that is asked for: ours would be no faster here. The log says why, once."""
    drop_in.forget_notes()
    x, w, _, target = inputs()
    with caplog.at_level("INFO", logger="liger_cutedsl"):
        for _ in range(2):
            log_probs, *_ = kernels.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, CHUNK)
    assert type(log_probs.grad_fn).__name__ == "ChunkedLogProbFunctionBackward"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("ChunkedLogProbFunction runs as it was before") and "cpu tensors" in said


@trls_on_a_cpu
def test_a_trl_without_a_head_for_the_cpu_leaves_it_to_ours(enabled, monkeypatch):
    """TRL 1.15, whose head is Triton's alone."""
    monkeypatch.delattr(HOME, "_use_triton")
    x, w, _, target = inputs()
    log_probs, *_ = kernels.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, CHUNK)
    assert "ChunkedLogProb" not in type(log_probs.grad_fn).__name__
    assert largest_error(log_probs, reference(*in_float64(x, w), target, temperature=0.7).log_probs) <= FLOAT32 * 60


@pytest.fixture
def calls_of_trls(monkeypatch):
    """What reaches TRL's own class."""
    calls = []

    def recorded(*arguments):
        calls.append(arguments)
        return "theirs"

    monkeypatch.setattr(HOME.ChunkedLogProbFunction, "apply", recorded)
    return calls


def test_an_output_that_ours_does_not_have_is_trls(ours, calls_of_trls):
    x, w, _, target = inputs()
    arguments = (x, w, None, target, 0.7, CHUNK, None, 1.0, ("entropy", "varentropy"))
    assert ours.apply(*arguments) == "theirs"
    assert len(calls_of_trls) == 1 and all(a is b for a, b in zip(calls_of_trls[0], arguments, strict=True))


OUTSIDE = {
    "temperature": dict(temperature=0.0),
    "a tensor": dict(temperature=torch.tensor(0.7)),
    "softcap": dict(softcap=0.0),
    "logit_scale": dict(logit_scale=float("inf")),
}


@trls_on_a_cpu
@pytest.mark.parametrize("case", OUTSIDE)
def test_a_value_outside_our_options_is_trls(enabled, calls_of_trls, case, monkeypatch):
    x, w, _, target = inputs()
    options = dict(temperature=1.0, softcap=None, logit_scale=1.0) | OUTSIDE[case]
    arguments = (x, w, None, target, options["temperature"], CHUNK, options["softcap"], options["logit_scale"])
    assert kernels.ChunkedLogProbFunction.apply(*arguments) == "theirs" and len(calls_of_trls) == 1
    monkeypatch.setenv("LIGER_CUTEDSL_ENGINE", "torch")  # a forced engine that cannot run is an error
    with pytest.raises((TypeError, ValueError), match=next(iter(OUTSIDE[case]))):
        kernels.ChunkedLogProbFunction.apply(*arguments)


@trls_on_a_cpu
def test_where_the_kernels_run_ours_does(enabled, calls_of_trls):
    """As on a GPU: the CuTe engine is possible, and the torch engine stands in for it."""
    x, w, _, target = inputs(torch.bfloat16)
    with testing.planted_kernel_failure("backward"):
        log_probs, *_ = kernels.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, 32768)
        assert not calls_of_trls and isinstance(log_probs, torch.Tensor)
        log_probs.sum().backward()  # without the kernel that failed
        assert testing.kernel_failure() is not None
        assert kernels.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, 32768) == "theirs"
    x64, w64 = in_float64(x, w)
    reference(x64, w64, target, temperature=0.7).log_probs.sum().backward()
    assert error(x.grad, x64.grad) <= torch.finfo(torch.bfloat16).eps / 2


# Memory


@trls_on_a_cpu
@pytest.mark.parametrize("trained", ["all", "hidden", "none"])
@pytest.mark.parametrize("kind", ["bfloat16", "autocast", "float32"])
def test_the_budget_is_what_trl_takes(kind, trained, monkeypatch):
    """Of the peak of TRL's own call, beside results and gradients, and never more."""
    monkeypatch.setattr(HOME, "TOKEN_CHUNK_SIZE", 128)
    tokens, hidden, vocab, chunk = 256, 256, 3000, 1024
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=trained != "none")
    w = torch.randn(vocab, hidden, dtype=dtype, requires_grad=trained == "all")
    target = torch.randint(0, vocab, (tokens,))

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            found = HOME.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, chunk)
        return torch.autograd.grad(found[0].sum(), [t for t in (x, w) if t.requires_grad]) if x.requires_grad else found

    call()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        budget = trl.original_bytes(Problem(x, w, target, options=trl.LogProbOptions()), None, chunk)
    results = sum(t.numel() * t.element_size() for t in (x, w) if t.requires_grad)
    assert budget > 0 and budget + results <= peak_of(call)
    logits = 128 * chunk * (4 if kind == "float32" else 2)
    sums = 4 * sum(t.numel() for t in (x, w) if t.requires_grad and kind == "bfloat16")
    casts = 2 * (chunk + 128) * hidden * (kind == "autocast")
    assert budget == logits + sums + casts


def test_the_users_workspace_comes_first(monkeypatch):
    x, w, _, target = inputs()
    problem = Problem(x, w, target)
    assert settings_within(problem, Settings.resolve(), 300 * 2**20).workspace_mb == 300
    with torch.autocast("cpu", dtype=torch.bfloat16):  # whose copies ours makes too
        copies = 2 * (TOKENS + VOCAB) * HIDDEN
        assert settings_within(problem, Settings.resolve(), 300 * 2**20).budget(0) == 300 * 2**20 - copies
    monkeypatch.setenv("LIGER_CUTEDSL_WORKSPACE_MB", "77")
    assert settings_within(problem, Settings.resolve(), 300 * 2**20).workspace_mb == 77


@pytest.mark.parametrize("workspace", [None, "77"])
@pytest.mark.parametrize("kind", ["float32", "autocast"])
def test_compiled_the_workspace_is_trls_too(ours, kind, workspace, monkeypatch):
    """Forward's and backward's, for every number of tokens of one graph; the user's where the variable names one."""
    if workspace:
        monkeypatch.setenv("LIGER_CUTEDSL_WORKSPACE_MB", workspace)

    def head(x, w, target):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            return ours.apply(torch.tanh(x), w, None, target, 0.7, 2**20)[0].sum()

    torch._dynamo.reset()
    dynamic = kind == "autocast" or None  # all sizes but a parameter's, or a second number of tokens
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (TOKENS, 40):
        x, w, _, target = inputs(tokens=tokens)
        w = torch.nn.Parameter(w.detach())
        with mock.patch.object(torch_compile_log_probs, "begun", wraps=torch_compile_log_probs.begun) as begun:
            compiled(x, w, target).backward()
        with mock.patch.object(trl, "run", wraps=trl.run) as run:
            head(x, w, target)
        eager = run.call_args.args[1]
        assert [call.args[2] for call in begun.call_args_list] == [eager] * 2
        assert eager.workspace_mb > 60 or workspace
        assert all(call.args[1].dense for call in begun.call_args_list), "its targets are not read"


# What is decided, read and refused


def test_a_call_is_planned_once(enabled):
    """Whose it is and how it runs: one question, whatever the answer; once more only for the rows that are left."""
    x, w, _, target = inputs(torch.bfloat16)
    counted = mock.patch.object(routing, "_known_plan", wraps=routing._known_plan)
    with testing.planted_kernel_failure("backward"), counted as plan:
        kernels.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, 32768)
    assert plan.call_count == 1


def test_a_planned_call_whose_kernel_fails_is_planned_again(enabled):
    x, w, _, target = inputs(torch.bfloat16)
    with testing.planted_kernel_failure("forward"):
        log_probs, *_ = kernels.ChunkedLogProbFunction.apply(x, w, None, target, 0.7, 32768)
        assert testing.kernel_failure() is not None
    x64, w64 = in_float64(x, w)
    assert largest_error(log_probs, reference(x64, w64, target, temperature=0.7).log_probs) <= FLOAT32 * 60


def test_targets_are_not_read(ours):
    """TRL filters them: no read of the device, in forward or backward."""
    x, w, _, target = inputs()
    with mock.patch.object(rows, "_summary", side_effect=AssertionError("read")):
        log_probs, *_ = ours.apply(x, w, None, target, 0.7, CHUNK)
        log_probs.sum().backward()


@pytest.mark.parametrize("schedule", ["kept", "tiles"])
@pytest.mark.parametrize("bad", [-1, -100, VOCAB, VOCAB + 5, 2**31 - 1])
def test_an_id_out_of_range_belongs_to_no_column(ours, bad, schedule, monkeypatch):
    """No access out of bounds, and nothing of another row changes."""
    if schedule == "tiles":
        monkeypatch.setenv("LIGER_CUTEDSL_WORKSPACE_MB", "0.05")
    x, w, _, target = inputs()
    y, v, *_ = inputs()
    ours.apply(y, v, None, target, 0.7, CHUNK)[0][1:].sum().backward()
    target[0] = bad
    found = ours.apply(x, w, None, target, 0.7, CHUNK)
    assert found[0][0] == -torch.inf and not found[4][0]
    found[0][1:].sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(w.grad, v.grad)
    x.grad = w.grad = None
    found = ours.apply(x, w, None, target, 0.7, CHUNK)
    loss_of(*found[:2]).backward()
    row = x.detach()[:1].double().requires_grad_()
    log_p = torch.log_softmax(row @ w.detach().double().T / 0.7, dim=1)
    lse = torch.logsumexp(row @ w.detach().double().T / 0.7, dim=1)
    (-2.0 * lse - 0.5 * (log_p.exp() * log_p).sum(dim=1)).sum().backward()  # without a target's logit
    assert largest_error(x.grad[:1], row.grad) <= FLOAT32 * 60


# enable() and disable()


def test_enable_binds_ours_wherever_trls_was_and_disable_brings_it_back(monkeypatch):
    utils = pytest.importorskip("trl.trainer.utils")
    theirs = HOME.ChunkedLogProbFunction
    mine = types.ModuleType("somebodys_trainer")
    mine.Head = theirs
    monkeypatch.setitem(sys.modules, "somebodys_trainer", mine)
    liger_cutedsl.enable()
    ours = trl.ChunkedLogProbFunction
    assert kernels.ChunkedLogProbFunction is utils._ChunkedLogProbFunction is mine.Head is ours
    assert HOME.ChunkedLogProbFunction is theirs, "what falls back calls it"
    liger_cutedsl.enable()
    liger_cutedsl.disable()
    assert kernels.ChunkedLogProbFunction is utils._ChunkedLogProbFunction is mine.Head is theirs
    liger_cutedsl.disable()


BEFORE_TRAINERS = """
import sys
import liger_cutedsl
assert "trl" not in sys.modules
liger_cutedsl.enable()
assert "trl.trainer.utils" not in sys.modules
import trl.trainer.utils as utils
from liger_cutedsl.liger.trl import ChunkedLogProbFunction
assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction
liger_cutedsl.disable()
from trl.kernels.chunked_logprob import ChunkedLogProbFunction as theirs
assert utils._ChunkedLogProbFunction is theirs
"""


def test_enable_before_trl_is_imported():
    done = subprocess.run([sys.executable, "-c", BEFORE_TRAINERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


KERNEL = """
OPTIONAL_OUTPUTS = {outputs}
class ChunkedLogProbFunction:
    def forward(ctx, {parameters}):
        pass
"""
KNOWN = ", ".join(trl.PARAMETERS)
OTHERS = {
    "older than 1.15": (None, "is not there: it came with TRL 1.15"),
    "another parameter": (dict(outputs=OPTIONAL_OUTPUTS, parameters=f"{KNOWN}, top_k"), "outputs, top_k"),
    "another output": (dict(outputs=(*OPTIONAL_OUTPUTS, "varentropy"), parameters=KNOWN), "varentropy"),
    "broken": (dict(outputs="1 / 0", parameters=KNOWN), "does not import (ZeroDivisionError"),
}


@pytest.fixture
def other_trl(tmp_path, monkeypatch):
    """A folder of packages before the installed ones, and a process that has imported no TRL and given no warning."""
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(trl, "_warned", False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trl").mkdir()
    yield tmp_path / "trl"
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        del sys.modules[name]


@pytest.mark.parametrize("other", OTHERS)
def test_another_trl_is_left_alone_with_one_warning(other_trl, other):
    module, words = OTHERS[other]
    (other_trl / "__init__.py").touch()
    if module is not None:
        (other_trl / "kernels").mkdir()
        (other_trl / "kernels" / "__init__.py").write_text("from .chunked_logprob import ChunkedLogProbFunction")
        (other_trl / "kernels" / "chunked_logprob.py").write_text(KERNEL.format(**module))
    with pytest.warns(RuntimeWarning, match="leaves TRL .* as it is") as said:
        assert trl.find_original() is None and trl.find_original() is None
    assert len(said) == 1 and words in str(said[0].message)


def test_without_trl_nothing_is_said(other_trl, monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert trl.find_original() is None
    monkeypatch.delitem(sys.modules, "trl")
    monkeypatch.setattr(sys, "path", [str(other_trl.parent)])  # nothing but a folder that happens to have the name
    assert trl.find_original() is None and not list(recwarn)
