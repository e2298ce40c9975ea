"""The benchmark's SmolLM2: its decoder against transformers', its weights' formats, and the harness of what is measured
with it, on a tiny model."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmark import density, report, sampling_report, smollm2, train  # noqa: E402
from benchmark.__main__ import main  # noqa: E402
from benchmark.records import read  # noqa: E402

CONFIG = smollm2.Config(vocab=97, hidden=48, intermediate=40, layers=3, heads=6, key_value_heads=2)


def llama():
    """transformers' model of CONFIG, float64, random."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab,
        hidden_size=CONFIG.hidden,
        intermediate_size=CONFIG.intermediate,
        num_hidden_layers=CONFIG.layers,
        num_attention_heads=CONFIG.heads,
        num_key_value_heads=CONFIG.key_value_heads,
        rms_norm_eps=CONFIG.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_base},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def as_gguf(model) -> dict[str, torch.Tensor]:
    """Its weights under GGUF's names, queries' and keys' planes as llama.cpp has them: axes side by side."""
    found = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for k, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        matrices = {"attn_v": attention.v_proj, "attn_output": attention.o_proj, "ffn_gate": mlp.gate_proj}
        matrices |= {"ffn_up": mlp.up_proj, "ffn_down": mlp.down_proj, "attn_norm": layer.input_layernorm}
        matrices |= {"ffn_norm": layer.post_attention_layernorm}
        found |= {f"blk.{k}.{name}.weight": module.weight for name, module in matrices.items()}
        for name, module in (("attn_q", attention.q_proj), ("attn_k", attention.k_proj)):
            heads = module.weight.view(-1, 2, CONFIG.head_dim // 2, CONFIG.hidden)
            found[f"blk.{k}.{name}.weight"] = heads.transpose(1, 2).reshape(module.weight.shape)
    return {name: tensor.detach() for name, tensor in found.items()}


def test_the_decoder_is_that_of_transformers():
    theirs = llama()
    ours = smollm2.Decoder(CONFIG).double()
    ours.load_state_dict(smollm2.state(as_gguf(theirs), CONFIG))
    ids = torch.randint(0, CONFIG.vocab, (2, 33))
    with torch.no_grad():
        found, expected = ours(ids) @ ours.embedding.t(), theirs(ids).logits
    # float64, but for the angles, which both compute in float32 and in an order of their own
    assert (found - expected).norm() / expected.norm() < 64 * torch.finfo(torch.float32).eps


def test_quantised_blocks_are_read_as_their_format_says():
    generator = np.random.default_rng(0)
    d, m = (generator.standard_normal(6).astype(np.float16) for _ in range(2))
    numbers = generator.integers(0, 16, (6, 32))
    nibbles = (numbers[:, :16] | numbers[:, 16:] << 4).astype(np.uint8)
    packed = np.concatenate([d.view(np.uint8).reshape(6, 2), m.view(np.uint8).reshape(6, 2), nibbles], axis=1)
    found = smollm2.dequantised("Q4_1", torch.from_numpy(packed.reshape(2, 60)))
    expected = (d[:, None].astype(np.float32) * numbers + m[:, None]).reshape(2, 96)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)  # a product and a sum of float32
    bytes_ = generator.integers(-128, 128, (6, 32)).astype(np.int8)
    packed = np.concatenate([d.view(np.uint8).reshape(6, 2), bytes_.view(np.uint8)], axis=1).reshape(2, 102)
    found = smollm2.dequantised("Q8_0", torch.from_numpy(packed))
    np.testing.assert_array_equal(found.numpy(), (d[:, None].astype(np.float32) * bytes_).reshape(2, 96))


def test_a_folder_without_weights_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"python -m benchmark\.pack_smollm2"):
        smollm2.load(tmp_path, "cpu", torch.float32)


def test_density_of_a_tiny_model(tmp_path, capsys):
    path = tmp_path / "density.json"
    assert main(["density", "--cpu", "--out", str(path)]) == 0
    rows = {row["tau"]: row for row in read(path) if row["kind"] == "density"}
    assert list(rows) == list(density.TAUS) and "| 0.003 |" in capsys.readouterr().out
    model, text = smollm2.tiny("cpu")
    tokens = text.held_out[:4]  # one of each kind
    with torch.no_grad():
        p = (model(tokens[:, :-1]).flatten(0, 1).double() @ model.embedding.double().t()).softmax(1)
    mass, target = p.view(len(p), -1, 128).sum(2), tokens[:, 1:].flatten() // 128
    for tau, row in rows.items():
        q = (mass / tau).clamp(max=1).scatter(1, target[:, None], 1.0)
        assert row["pairs"] == pytest.approx(float(q.mean()), rel=1e-3)  # four digits are written
    # The mean of three draws of Σ over some 500 pairs: the prediction is of a draw's square.
    assert rows[1.0]["dw_noise"] == pytest.approx(rows[1.0]["dw_predicted"], rel=0.3)
    assert rows[3e-4]["dw_noise"] == 0.0 and rows[3e-4]["pairs"] == rows[3e-4]["call_kept"] == 1.0
    # A draw of the call's own; where nothing is drawn, the rounding of float32 sums.
    assert rows[10.0]["call_dw"] == pytest.approx(rows[10.0]["dw_predicted"], rel=0.5)
    assert rows[3e-4]["call_dw"] < 64 * torch.finfo(torch.float32).eps


def test_training_runs_of_a_tiny_model(tmp_path, capsys):
    """Every τ with every seed: the same start, and of one seed the same batches whatever τ is."""
    path = tmp_path / "train.json"
    command = ["train", "--cpu", "--steps", "3", "--workers", "2", "--out", str(path)]
    assert main(command) == 0
    rows = [row for row in read(path) if row["kind"] == "training"]
    assert not [row["skipped"] for row in rows if row["skipped"]]
    assert {(row["tau"], row["seed"]) for row in rows} == {(t, s) for t in train.TAUS for s in range(train.SEEDS)}
    assert len({row["held_out"][0][1] for row in rows}) == 1, "weights are put back between runs"
    first = {seed: {row["losses"][0] for row in rows if row["seed"] == seed} for seed in range(train.SEEDS)}
    assert all(len(losses) == 1 for losses in first.values()), "the loss is exact, and the batches are the seed's"
    assert len(set.union(*first.values())) == train.SEEDS
    assert [step for step, _ in rows[0]["held_out"]] == [0, 1, 2, 3]
    says = {0.0: "single_pass", 100.0: "sampled"}
    assert all(says.get(row["tau"], "sampling would keep 1.00 of the pairs") in row["route"] for row in rows)
    assert all((row["pairs"] < 1) == (row["noise_dw"] > 0) == (row["tau"] == 100) for row in rows), (
        "5 tiles, near uniform"
    )
    assert "| exact | 5 |" in capsys.readouterr().out
    assert main(command) == 0
    assert len(read(path)) == len(rows) + 1, "what is there is not run again"


def rows_of_a_worker(run: train.Run) -> list[dict]:
    rows = []
    taken = train.multiprocessing.get_context("spawn").Value("i", 0)
    train.work([run], taken, type("Queue", (), {"put": staticmethod(rows.append)}), "cpu", Path())
    return rows


def test_a_run_ends_at_its_deadline():
    """Before it begins, and between two steps."""
    assert not rows_of_a_worker(train.Run(0.0, 0, 3, deadline=0.0))
    model, text = smollm2.tiny("cpu")
    master = train.Master(model, torch.float32)
    assert train.trained(train.Run(0.0, 0, 3, deadline=0.0), model, master, text) is None


def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "TAUS", (-1.0,))
    monkeypatch.setattr(train, "SEEDS", 1)
    path = tmp_path / "train.json"
    assert main(["train", "--cpu", "--steps", "3", "--out", str(path)]) == 1
    assert "gradient_sampling" in read(path)[1]["skipped"]


def test_a_loss_that_is_not_finite_is_a_failure():
    model, text = smollm2.tiny("cpu")
    master = train.Master(model, torch.float32)
    master.first[0] = float("nan")
    row = train.trained(train.Run(0.0, 0, 3, float("inf")), model, master, text)
    assert "finite" in row["skipped"]


def made_up_rows():
    rows = [{"kind": "environment", "gpu": "a GPU"}]
    for tau in (0.0, 3e-3, 1.0):
        for seed in range(2):
            held_out = [[0, 3.0], [10, 2.0 + tau + seed / 8]]
            rows.append(
                {
                    "kind": "training",
                    "tau": tau,
                    "seed": seed,
                    "steps": 10,
                    "skipped": "",
                    "pairs": 0.5,
                    "noise_dx": 0.01,
                    "noise_dw": 0.02,
                }
                | {"losses": [3.0], "held_out": held_out, "seconds": 1.0}
            )
    return rows


def test_the_training_table_compares_seed_with_seed():
    lines = sampling_report.training_table(made_up_rows()).splitlines()
    assert lines[2] == "| exact | 2 | 0.500 | 0 | 2.0625 (2.0000 to 2.1250) | – | – |"
    noise = "0.500 | 1.0e-02, 2.0e-02"
    same, far = "+0.0030 (+0.0030 to +0.0030) | yes", "+1.0000 (+1.0000 to +1.0000) | no"
    assert lines[3] == f"| 0.003 | 2 | {noise} | 2.0655 (2.0030 to 2.1280) | {same} |"
    assert lines[4] == f"| 1 | 2 | {noise} | 3.0625 (3.0000 to 3.1250) | {far} |"


def test_documents_show_training_as_soon_as_there_are_results(tmp_path, monkeypatch):
    page = "<!-- training: written by x -->\n<!-- end training -->"
    monkeypatch.setattr(report, "TRAINING", tmp_path / "train.json")
    assert "training" not in report.sampling_sections()
    report.TRAINING.write_text("\n".join(map(json.dumps, made_up_rows())))
    shown = report.filled(page, {"training": report.sampling_sections()["training"]}, "page")
    assert "trained for 10 steps" in shown and "a GPU" in shown and "| 0.003 | 2 |" in shown and "training.png" in shown


def test_the_training_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = sampling_report.draw_training(made_up_rows(), tmp_path / "training.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
