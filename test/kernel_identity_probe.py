"""Compiles the exponentials kernel for some dtypes, in their order, and prints what lies in the cache then.

    QUACK_CACHE_DIR=FOLDER python test/kernel_identity_probe.py sm_90a bf16 fp16

One line a kernel: its dtype, whether its code adds fp16's headroom of 2¹⁵, and its file. Needs no GPU.
"""

import os
import re
import sys
from pathlib import Path

from liger_cutedsl.ahead_of_time import Variant, _trace, disassemble, target_environment
from liger_cutedsl.epilogues import EpilogueFlags

arch, *dtypes = sys.argv[1:]
os.environ.update(target_environment(arch))

import quack.gemm_runtime.host as host  # noqa: E402

host.get_max_active_clusters = lambda *_: 1
for dtype in dtypes:
    _trace(Variant("exp", EpilogueFlags(), dtype))
for compiled in sorted(Path(os.environ["QUACK_CACHE_DIR"]).rglob("*.o")):
    sass = disassemble(compiled.read_bytes())
    dtype = "bf16" if "BF16" in sass else "fp16"
    # x·log2(e) + 15, or packed additions of 15 on Blackwell
    headroom = re.search(r"\b(FFMA|FADD2)\b[^;]*\b15 ;", sass) is not None
    print(dtype, headroom, f"{compiled.parent.name}/{compiled.name}")
