"""The interpreter of ptx/ itself, on small kernels written by hand: what it computes, and what it calls an error."""

import numpy as np
import pytest
import torch

from ptx.machine import Launch
from ptx.memory import GlobalMemory, Window
from ptx.parsing import Kernel
from ptx.values import PtxError

HEAD = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry small(.param .u64 small_param_0) .reqntid {threads}, 1, 1
{{
    .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [small_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.b32 %r2, [%rd3];
"""
RETURN = "ret;\n}"


def run(body: str, values: np.ndarray, threads: int = 32, window: Window | None = None, seed=None) -> np.ndarray:
    """Runs HEAD, which loads a value a thread into %r2, and body. Returns the values, which it may have changed."""
    values = values.copy()
    kernel = Kernel(HEAD.format(threads=threads) + body + RETURN)
    address = values.ctypes.data
    memory = GlobalMemory([window or Window(address, values.view(np.uint8), values.nbytes, values.nbytes)])
    Launch(kernel, address.to_bytes(8, "little"), memory, (1, 1, 1), (1, 1, 1)).run(seed)
    return values


def floats(count: int = 32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(count).astype(np.float32)


def test_a_store_per_lane_under_a_predicate():
    values = floats()
    changed = run("setp.lt.u32 %p1, %r1, 5; add.f32 %r3, %r2, 0f3F800000; @%p1 st.global.b32 [%rd3], %r3;", values)
    assert np.array_equal(changed, np.where(np.arange(32) < 5, values + 1, values))


def test_lanes_part_at_a_branch_and_meet_behind_it():
    body = """
        and.b32 %r4, %r1, 1; setp.eq.b32 %p1, %r4, 0; @%p1 bra $EVEN;
        mul.f32 %r5, %r2, 0f40000000; bra.uni $JOIN;
        $EVEN: neg.f32 %r5, %r2;
        $JOIN: bar.warp.sync -1; st.global.b32 [%rd3], %r5;"""
    values = floats()
    odd = np.arange(32) % 2 == 1
    assert np.array_equal(run(body, values), np.where(odd, 2 * values, -values))


def test_conversion_to_bf16_rounds_to_nearest_even():
    values = np.concatenate([floats(60) * 10.0 ** np.arange(-30, 30, dtype=np.float32), [np.inf, -np.inf, 0, np.nan]])
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    values = np.concatenate([values, ties, floats(96 - 67)]).astype(np.float32)
    found = run("cvt.rn.bf16x2.f32 %r3, %r2, 0f00000000; st.global.b32 [%rd3], %r3;", values, threads=96)
    halves = torch.from_numpy((found.view(np.uint32) >> 16).astype(np.uint16)).view(torch.bfloat16)
    torch.testing.assert_close(halves, torch.from_numpy(values).bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_shuffle_sums_a_warp():
    steps = "".join(f"shfl.sync.bfly.b32 %r4, %r2, {k}, 31, -1; add.f32 %r2, %r2, %r4;" for k in (16, 8, 4, 2, 1))
    values = floats()
    np.testing.assert_allclose(run(steps + "st.global.b32 [%rd3], %r2;", values), values.sum(dtype=np.float64), 1e-5)


EXCHANGE = """
    shl.b32 %r4, %r1, 2; mov.b32 %r9, __dynamic_shmem__0; add.s32 %r5, %r9, %r4;
    st.shared.b32 [%r5], %r2; {barrier}
    xor.b32 %r6, %r4, 128; add.s32 %r7, %r9, %r6;
    ld.shared.b32 %r8, [%r7]; st.global.b32 [%rd3], %r8;"""


def test_a_missing_barrier_shows_in_some_order():
    """Two warps exchange values through shared memory; without the barrier one may read before the other wrote."""
    values = floats(64)
    swapped = np.roll(values, 32)
    for seed in range(8):
        assert np.array_equal(run(EXCHANGE.format(barrier="bar.sync 1, 64;"), values, 64, seed=seed), swapped)
    found = [run(EXCHANGE.format(barrier=""), values, 64, seed=seed) for seed in range(8)]
    assert any(np.isnan(f).any() for f in found)


WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r9], 0, 10000000;"
INIT = "mov.b32 %r9, __dynamic_shmem__0; mbarrier.init.shared.b64 [%r9], 1;"
ONE_LANE = "elect.sync %r10|%p1, -1;"


@pytest.mark.parametrize(
    "body, message",
    [
        ("frobnicate.b32 %r3, %r2;", "unknown instruction frobnicate.b32 %r3, %r2"),
        ("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r3}, [%r2];", "unknown instruction tcgen05.ld"),
        ("st.global.b32 [%rd3+4], %r2;", "lies in no tensor of the launch"),
        ("ld.global.b32 %r3, [%rd3+-4];", "lies in no tensor of the launch"),
        ("ld.global.b32 %r3, [%rd3+2];", "misaligned"),
        ("add.s32 %r3, %r2, %r20;", "'%r20' was never written"),
        ("mov.b32 %r9, 300000; st.shared.b32 [%r9], %r2;", "outside shared memory"),
        (f"{ONE_LANE} @%p1 {WAIT}", "was never written"),
        (f"mov.b32 %r9, __dynamic_shmem__0; {WAIT}", "no mbarrier at"),
        (f"{INIT} {WAIT}", "deadlock"),
        (f"{INIT} mbarrier.arrive.shared.b64 %rd4, [%r9], 2;", "more arrivals"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bar.sync 1, 32;", "bar.sync by a part of a warp"),
        ("bar.sync 1, 64;", "deadlock"),
        ("cp.async.commit_group; cp.async.bulk.commit_group;", "ends before its copies"),
    ],
)
def test_errors_say_what_and_where(body, message):
    with pytest.raises(PtxError, match=r"warp 0|CTA 0") as error:
        run(body, floats())
    assert message in str(error.value)


def test_between_the_rows_of_a_matrix_nothing_may_be_touched():
    values = floats(64)
    rows = Window(values.ctypes.data, values.view(np.uint8), row_bytes=16, pitch=32)
    kernel = Kernel(HEAD.format(threads=32) + RETURN)  # 32 lanes read 128 bytes: past the first row's 16
    launch = Launch(kernel, values.ctypes.data.to_bytes(8, "little"), GlobalMemory([rows]), (1, 1, 1), (1, 1, 1))
    with pytest.raises(PtxError, match="between the rows of a tensor"):
        launch.run()
