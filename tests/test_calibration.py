"""Calibration of the sources of trained models."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GPSConv

from sbm_pyg import AttentionConv, Rotary, SBMAttentionConv, calibrate, make_attention, patterns, replace_attention
from sbm_pyg.analysis import compare_heads
from sbm_pyg.layers import calibration
from sbm_pyg.sources.selectors import TopKSource

LINEAR: dict[str, Any] = {"parameterization": "linear", "num_clusters": 4}


def encoder(layers: int = 2, **options: Any) -> Any:
    """A model of torch with large queries, so that its attention is far from flat, and with sources."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    with torch.no_grad():
        for part in model.layers:
            part.self_attn.in_proj_weight[:32] *= 4
    replace_attention(model, **options or LINEAR)
    return model


def batches(count: int = 3, length: int = 60) -> list[torch.Tensor]:
    torch.manual_seed(1)
    words = torch.randn(6, 16)
    return [words[torch.randint(6, (2, length))] for _ in range(count)]


@pytest.mark.parametrize(
    "options",
    [LINEAR, LINEAR | {"candidates": 2}, {"num_clusters": 4}, {"source": "indexer", "target_density": 1.0}],
    ids=["linear", "candidates", "perceptron", "indexer"],
)
def test_graphs_keep_more_of_the_attention(options: dict[str, Any]) -> None:
    model = encoder(**options)
    rows = calibrate(model, batches(), density=0.2, steps=60, learning_rate=1e-2, progress=False)
    assert [row.layer for row in rows] == ["layers.0.self_attn.conv", "layers.1.self_attn.conv"]
    for row in rows:
        assert row.loss < row.loss_before
        assert row.kept > row.kept_before + 0.05
    for layer in model.layers:
        assert layer.self_attn.conv.source.target_density == 0.2


def one_broad_head() -> Any:
    """An encoder whose second head attends to all keys alike."""
    model = encoder(1, source="top_k", target_density=1.0)
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[8:16] *= 0.01
    return model


def test_heads_that_attend_to_many_keys_get_more_of_the_density() -> None:
    words = [torch.randn(2, 60, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model, alike = one_broad_head(), one_broad_head()
    row = calibrate(model, words, density=0.2, progress=False)[0]
    assert math.isnan(row.loss)
    assert row.kept > row.kept_before + 0.01
    source = model.layers[0].self_attn.conv.source
    peaked, broad = source.head_budgets.tolist()
    assert broad > 1.2
    assert peaked + broad == pytest.approx(2)
    alike.layers[0].self_attn.conv.source.target_density = 0.2
    densities = []
    for each in (model, alike):
        with compare_heads(each) as table, torch.no_grad():
            each.eval()(words[-1])
        densities.append([head.density for head in table.heads])
    assert sum(densities[0]) == pytest.approx(sum(densities[1]), abs=0.02)
    assert densities[0] == pytest.approx([0.2 * peaked, 0.2 * broad], abs=0.02)
    unchanged = one_broad_head()
    with pytest.raises(ValueError, match="source to fit"):
        calibrate(unchanged, words, density=0.2, by_head=False, progress=False)


@pytest.mark.parametrize("candidates", [1, 3])
def test_block_models_draw_the_density_of_each_head(candidates: int) -> None:
    model = encoder(1, **LINEAR, candidates=candidates)
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[8:16] *= 0.01
    words = [torch.randn(2, 200, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    calibrate(model, words, density=0.1, by_head=True, steps=30, progress=False)
    source = model.layers[0].self_attn.conv.source
    assert source.head_budgets[1] > 1.3
    with compare_heads(model) as table, torch.no_grad():
        model.eval()(words[-1])
    assert [head.density for head in table.heads] == pytest.approx((0.1 * source.head_budgets).tolist(), abs=0.02)


def test_a_large_density_is_divided_whole() -> None:
    model = one_broad_head()
    calibrate(model, batches(), density=0.8, progress=False)
    densities = 0.8 * model.layers[0].self_attn.conv.source.head_budgets
    assert float(densities.clamp(max=1).mean()) == pytest.approx(0.8, abs=0.03)


def test_block_models_without_a_density_learn_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "kept_attention", None)  # which needs a density
    conv = SBMAttentionConv(16, 8, 2, num_clusters=4)
    row = calibrate(conv, [torch.randn(50, 16) for _ in range(2)], steps=5, progress=False)[0]
    assert row.loss < row.loss_before


def test_budgets_follow_the_tokens_to_their_device() -> None:
    source = TopKSource(target_density=0.2)
    source.head_budgets = torch.ones(2)
    densities = source._densities(torch.device("meta"))
    assert isinstance(densities, torch.Tensor)
    assert densities.device.type == "meta"


def test_steps_improve_the_start() -> None:
    start, trained = (
        calibrate(encoder(), batches(), density=0.2, steps=steps, learning_rate=1e-2, progress=False)
        for steps in (0, 100)
    )
    assert all(after.loss < before.loss for before, after in zip(start, trained, strict=True))


def test_nothing_but_the_sources_changes() -> None:
    model = encoder()
    model.layers[0].train()
    model.layers[1].eval()
    for parameter in model.layers[0].self_attn.conv.source.parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model)
    calibrate(model, batches(), density=0.2, steps=3, progress=False)
    changed = []
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        assert old.requires_grad == new.requires_grad
        assert new.grad is None
        changed += [] if torch.equal(old, new) else [name]
    assert changed
    assert all(".source." in name for name in changed)
    for old, new in zip(before.modules(), model.modules(), strict=True):
        assert old.training == new.training
    assert type(model.layers[0].self_attn.conv.estimator) is type(before.layers[0].self_attn.conv.estimator)


def test_an_error_of_the_model_leaves_it_as_it_was() -> None:
    model = encoder()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="query"):
        calibrate(model, [torch.randn(2, 5, 7)], density=0.2, progress=False)
    assert all(torch.equal(*pair) for pair in zip(before.parameters(), model.parameters(), strict=True))
    source = model.layers[0].self_attn.conv.source
    assert source.target_density == 1
    assert type(model.layers[0].self_attn.conv.estimator) is type(before.layers[0].self_attn.conv.estimator)


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [x.clone() for x in model.state_dict().values()]


def test_an_interrupted_calibration_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoder()
    expected = calibrate(whole, batches(), density=0.2, steps=5, seed=3, progress=False)
    original, calls = calibration._calibrated, []

    def interrupted(source: Any, *arguments: Any) -> Any:
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(source, *arguments)

    monkeypatch.setattr(calibration, "_calibrated", interrupted)
    how: dict[str, Any] = {"density": 0.2, "steps": 5, "seed": 3, "progress": False, "directory": tmp_path / "new"}
    with pytest.raises(KeyboardInterrupt):
        calibrate(encoder(), batches(), **how)
    model = encoder()
    rows = calibrate(model, batches(), **how)
    assert len(calls) == 3  # the first source is not trained again
    assert rows == expected
    assert all(torch.equal(*pair) for pair in zip(bits(model), bits(whole), strict=True))
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".json", ".safetensors"}


def test_a_folder_of_another_calibration_is_refused(tmp_path: Path) -> None:
    how: dict[str, Any] = {"density": 0.2, "steps": 1, "progress": False, "directory": tmp_path}
    calibrate(encoder(), batches(), **how)
    with pytest.raises(ValueError, match=r"'directory'.*another \['steps'\]"):
        calibrate(encoder(), batches(), **how | {"steps": 2})
    with pytest.raises(ValueError, match=r"'directory'.*another \['batches'\]"):
        calibrate(encoder(), batches()[::-1], **how)


def test_tokens_on_disk_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory, on_disk = encoder(), encoder()
    calibrate(in_memory, batches(), density=0.2, steps=3, progress=False)
    stored: list[Path] = []
    save = torch.save

    def spy(x: Any, path: Path) -> None:
        stored.append(path)
        save(x, path)

    monkeypatch.setattr(torch, "save", spy)
    monkeypatch.setattr(calibration.checks, "available", lambda device: 2000.0)
    calibrate(on_disk, batches(), density=0.2, steps=3, progress=False, directory=tmp_path)
    assert len(stored) == 6
    assert not any(path.exists() for path in stored)
    assert all(torch.equal(*pair) for pair in zip(bits(in_memory), bits(on_disk), strict=True))


def test_layers_may_share_a_source() -> None:
    model: Any = nn.Sequential(*(SBMAttentionConv(16, 8, 2, num_clusters=4, target_density=0.3) for _ in range(2)))
    model[1].source = model[0].source
    rows = calibrate(model, [torch.randn(50, 16)], steps=2, progress=False)
    assert [row.layer for row in rows] == ["0"]


def test_scores_of_a_layer_with_rotary_positions_and_a_bias() -> None:
    conv = make_attention("sbm", 16, 8, 2, **LINEAR, target_density=0.2, rotary=Rotary(), is_causal=True)
    conv.score_bias = lambda query, key, graph: -0.1 * graph.lag.abs().to(query.dtype)
    row = calibrate(conv, [(torch.randn(40, 16),) for _ in range(2)], steps=2, progress=False)[0]
    assert 0 < row.kept <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_types(dtype: torch.dtype) -> None:
    model = encoder(1).to(dtype)
    calibrate(model, [x.to(dtype) for x in batches()], density=0.2, steps=2, progress=False)
    source = model.layers[0].self_attn.conv.source
    assert all(parameter.dtype == dtype for parameter in source.parameters())
    assert model.eval()(batches()[0].to(dtype)).isfinite().all()


def test_a_model_of_graphs_by_a_function() -> None:
    model: Any = nn.ModuleList([GPSConv(16, conv=None, heads=2)])
    replace_attention(model, source="sbm", **LINEAR)
    sizes = (30, 20)
    data = [Batch.from_data_list([Data(x=torch.randn(n, 16)) for n in sizes]) for _ in range(2)]
    rows = calibrate(
        model, data, density=0.3, steps=2, progress=False, forward=lambda x: model[0](x.x, None, batch=x.batch)
    )
    assert rows[0].layer == "0.attn"


def test_progress_says_how_much_attention_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(encoder(1), batches(), density=0.2, steps=1)
    said = capsys.readouterr().err
    assert "record" in said
    assert "layers.0.self_attn.conv keeps 0." in said


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": 3}, TypeError, "model"), ({"model": nn.Linear(3, 3)}, ValueError, "source to fit"),
        ({"model": AttentionConv(16, 8, source=patterns.PatternSource(patterns.full))}, ValueError, "source to fit"),
        ({"model": make_attention("top_k", 16, 8, 2), "by_head": False}, ValueError, "source to fit"),
        ({"by_head": 2}, TypeError, "by_head"), ({"batches": []}, ValueError, "batches"),
        ({"forward": lambda batch: None}, ValueError, "reach each source"), ({"density": None}, ValueError, "density"),
        ({"density": 1.0}, ValueError, "density"), ({"steps": -1}, ValueError, "steps"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate"), ({"seed": "a"}, TypeError, "seed"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"model": encoder(1), "batches": batches(), "density": 0.2, "progress": False} | change
    with pytest.raises(error, match=words):
        calibrate(arguments.pop("model"), arguments.pop("batches"), **arguments)


@pytest.mark.filterwarnings("ignore")  # remarks of transformers
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_decoder_of_transformers_with_padding(with_bias: bool, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "initializer_range": 0.5}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    replace_attention(model, **LINEAR, candidates=2, window=1)
    words = torch.randint(1, 40, (3, 2, 30))
    real = torch.ones(2, 30, dtype=torch.long)
    real[0, :10] = 0  # padded on the left
    bias = torch.zeros(2, 1, 30, 30).masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -1e9) - 0.1
    examples = [{"input_ids": part, "attention_mask": bias if with_bias else real} for part in words]
    rows = calibrate(model, examples, density=0.2, steps=30, progress=False)
    assert [row.layer for row in rows] == [f"model.layers.{layer}.self_attn.sbm.conv" for layer in range(2)]
    assert all(row.loss < row.loss_before for row in rows)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    out, again = (part.eval()(words[0], attention_mask=real).logits for part in (model, loaded))
    torch.testing.assert_close(out, again)
