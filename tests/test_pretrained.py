"""Models in folders: what goes in comes out, writes are whole or not at all, and every misfit is named."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from problems import in_a_fork
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from sbm_pyg import (
    ALiBi,
    MaskedLM,
    PairClassifier,
    Pretrained,
    SequenceClassifier,
    SequenceEncoder,
    TokenClassifier,
    estimators,
    pretrained,
)
from sbm_pyg.layers.dense import FullAttention

PTR = torch.tensor([0, 10, 17, 30])
TOKENS = torch.randint(0, 15, (30,), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, dict[str, Any]] = {
    "sbm": {"num_blocks": 4, "dropout": 0.1, "sbm_options": {"cluster_init": "orthogonal"}}, "full": {"dropout": 0.1},
    "window": {"size": 2}, "bigbird": {"num_random": 1},
}  # fmt: skip
FILES = ["README.md", "config.json", "model.safetensors"]


class Doubled(TokenClassifier):
    """A model of a user."""


def encoder(attention: Any = "sbm", **options: Any) -> SequenceEncoder:
    torch.manual_seed(0)
    named = {"attention_options": OPTIONS[attention]} if isinstance(attention, str) else {}
    return SequenceEncoder(15, 16, attention=attention, max_length=40, **(named | options))


MODELS: dict[str, Callable[[], Pretrained]] = {
    **{f"encoder, {name}": partial(encoder, name, head_channels=4, ffn_channels=24, dropout=0.3) for name in OPTIONS},
    "sequences": lambda: SequenceClassifier(encoder(heads=1, num_layers=1), 3), "pairs": lambda: PairClassifier(encoder("full"), 4),
    "tokens": lambda: TokenClassifier(encoder("bigbird"), 5), "subclass": lambda: Doubled(encoder(), 2),
    "masked": lambda: MaskedLM(encoder(position_encoding="rotary")),
}  # fmt: skip


def run(model: nn.Module) -> Tensor:
    tokens, ptr = ((TOKENS, TOKENS.flip(0)), (PTR, PTR)) if isinstance(model, PairClassifier) else (TOKENS, PTR)
    return model(tokens, ptr, seed=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    SequenceClassifier(encoder(), 10).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = MODELS[name]().to(dtype).eval()
    model.save_pretrained(tmp_path / "deep" / "model")
    assert sorted(os.listdir(tmp_path / "deep" / "model")) == FILES
    assert os.listdir(tmp_path / "deep") == ["model"]  # no drafts left behind
    again = type(model).from_pretrained(str(tmp_path / "deep" / "model"))
    assert type(again) is type(Pretrained.from_pretrained(tmp_path / "deep" / "model")) is type(model)
    assert not again.training
    assert again.constructor_options().keys() == model.constructor_options().keys()
    assert repr(again) == repr(model)  # dropout rates and widths among others
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key], value)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert torch.equal(run(again), run(model))


def test_all_files_have_the_mode_of_new_files(saved: Path) -> None:
    (saved.parent / "new").touch()
    assert {path.stat().st_mode for path in saved.iterdir()} == {(saved.parent / "new").stat().st_mode}


def test_every_constructor_option_comes_back(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "num_tokens": 9, "channels": 12, "num_layers": 3, "heads": 3, "head_channels": 5, "ffn_channels": 7, "max_length": 11,
        "dropout": 0.25, "attention": "sbm",
        "attention_options": {"num_blocks": 2, "exploration": 0.5, "estimator": "paper", "budget": 3.5, "window": 1, "normalizer": "entmax15"},
        "is_causal": True, "position_encoding": "alibi",
    }  # fmt: skip
    model = SequenceEncoder(**options)
    assert model.constructor_options() == options | {"in_channels": None}
    model.save_pretrained(tmp_path / "model")
    again = SequenceEncoder.from_pretrained(tmp_path / "model")
    assert again.constructor_options() == options | {"in_channels": None}
    layer: Any = again.layers[0].attention
    source = layer.source
    assert (source.exploration, source.budget, source.window, layer.normalizer) == (0.5, 3.5, 1, "entmax15")
    assert type(layer.estimator) is estimators.Paper
    assert type(layer.score_bias) is ALiBi


def test_saving_changes_nothing_and_loading_leaves_random_numbers_alone(tmp_path: Path) -> None:
    model = SequenceClassifier(encoder(), 10)
    before, state = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    model.save_pretrained(tmp_path / "model")
    SequenceClassifier.from_pretrained(tmp_path / "model")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_loaded_model_goes_on_learning(saved: Path) -> None:
    model = SequenceClassifier.from_pretrained(saved).train()
    run(model).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "sbm" not in name)


def test_weights_that_are_views_are_saved_whole(tmp_path: Path) -> None:
    model = SequenceClassifier(encoder(), 10)
    weight = torch.randn(10, model.encoder.ffn_channels * 2)[:, ::2]
    model.classifier[2].weight = nn.Parameter(weight)
    model.save_pretrained(tmp_path / "model")
    again = SequenceClassifier.from_pretrained(tmp_path / "model")
    assert torch.equal(again.classifier[2].weight, weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_lie_where_torch_puts_its_own(saved: Path, dtype: torch.dtype) -> None:
    """Products of matrices may round otherwise elsewhere. Headers of all lengths put the numbers of the file at all places."""
    weights = saved / "model.safetensors"
    state = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load_file(weights).items()}
    for spaces in range(0, 64, 8):
        safetensors.torch.save_file(state, weights, metadata={"space": " " * spaces})
        edit(saved, sha256={"model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()})
        tensors = SequenceClassifier.from_pretrained(saved).state_dict()
        assert {name: tensor.data_ptr() % 64 for name, tensor in tensors.items() if tensor.numel()} == dict.fromkeys(
            state, 0
        )
        assert all(
            torch.equal(tensors[name], tensor) and tensors[name].dtype == dtype for name, tensor in state.items()
        )


class Odd(Pretrained):
    """A parameter under two names, one that waits for its size, a mask with infinity, memory that is shared, and what no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.lazy, self.graph = nn.LazyLinear(3), Linear(-1, 2)
        whole = torch.zeros(6)
        self.left, self.right = nn.Parameter(whole[:3]), nn.Parameter(whole[3:], requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("table", torch.arange(3), persistent=False)

    def constructor_options(self) -> dict[str, Any]:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return self.lazy(self.second(self.first(x))).sum() + self.graph(x).sum()


def test_shared_and_lazy_parameters_come_back(tmp_path: Path) -> None:
    model, x = Odd(), torch.randn(5, 4)
    with pytest.raises(
        ValueError, match=re.escape("Expected 'lazy.weight' to hold numbers (got a lazy parameter). Call the model")
    ):
        model.save_pretrained(tmp_path / "model")
    model(x)
    model.double()
    model.graph.float()
    model.save_pretrained(tmp_path / "model")
    again = Odd.from_pretrained(tmp_path / "model")
    assert again.first.weight is again.second.weight
    assert {name: value.dtype for name, value in again.state_dict().items()} == {
        n: v.dtype for n, v in model.state_dict().items()
    }
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert again.get_buffer("table").tolist() == [0, 1, 2]
    again.float()
    torch.testing.assert_close(again(x), model.float()(x))
    with pytest.raises(
        ValueError, match=re.escape("Expected 'left' to hold numbers (got a meta tensor). Load weights")
    ):
        model.to("meta").save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(saved: Path, number: float, tmp_path: Path) -> None:
    model = SequenceClassifier.from_pretrained(saved)
    name = (
        "encoder.layers.1.norm.weight" if "encoder.layers.1.norm.weight" in model.state_dict() else "classifier.2.bias"
    )
    with torch.no_grad():
        model.get_parameter(name)[3] = number
    with pytest.raises(ValueError, match=re.escape(f"Expected '{name}' to be finite (got values from ")):
        model.save_pretrained(tmp_path / "diverged")
    assert not (tmp_path / "diverged").exists()
    weights = saved / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), weights)
    edit(saved, sha256={"model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()})
    with pytest.raises(ValueError, match=re.escape(f"Expected '{name}' in '{weights}' to be finite (got values from ")):
        SequenceClassifier.from_pretrained(saved)


def test_weights_of_another_kind_of_number_are_refused(tmp_path: Path) -> None:
    """Not whole numbers in place of real ones, nor the other way round."""
    model = encoder(attention_options={"num_blocks": 2, "target_density": 0.5})
    model.save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    for name, dtype in (("norm.weight", torch.int64), ("layers.0.attention.source.last_seed", torch.float32)):
        state = {**model.state_dict()}
        state |= {name: state[name].to(dtype)}
        safetensors.torch.save_file(state, weights)
        edit(tmp_path / "model", sha256={"model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()})
        with pytest.raises(ValueError, match=re.escape(f"Expected '{name}' in '{weights}' to be as torch.")):
            SequenceEncoder.from_pretrained(tmp_path / "model")


def test_weights_go_to_the_device(saved: Path) -> None:
    if torch.cuda.is_available():
        assert {
            parameter.device.type for parameter in SequenceClassifier.from_pretrained(saved, device="cuda").parameters()
        } == {"cuda"}
    assert {
        parameter.device
        for parameter in SequenceClassifier.from_pretrained(saved, device=torch.device("cpu")).parameters()
    } == {torch.device("cpu")}


def test_no_weights_go_to_meta(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected 'device' to be one that holds weights \(got 'meta'\)"):
        SequenceClassifier.from_pretrained(saved, device="meta")


def test_nothing_is_pickled_or_executed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was used")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, refuse)
    SequenceClassifier.from_pretrained(saved).save_pretrained(saved)
    assert (
        safetensors.torch.load_file(saved / "model.safetensors").keys()
        == SequenceClassifier.from_pretrained(saved).state_dict().keys()
    )


# ------------------------------------------------------------------------------------------------ what the folder says


def test_config_holds_version_class_options_and_hashes(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert config["version"] == pretrained.__version__
    assert config["class"] == "SequenceClassifier"
    assert config["options"]["num_classes"] == 10
    assert config["options"]["encoder"]["class"] == "SequenceEncoder"
    assert config["options"]["encoder"]["options"]["attention_options"] == OPTIONS["sbm"]
    assert config["sha256"] == {
        "model.safetensors": hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    }


def test_card_states_task_metric_and_density(tmp_path: Path) -> None:
    model = SequenceClassifier(encoder(), 10)
    density = torch.tensor([[0.25, 0.125], [0.5, 0.0625]])
    model.save_pretrained(
        tmp_path / "model", task="ListOps | flat", metric={"test accuracy": 0.7371, "loss": 1}, density=density
    )
    card = (tmp_path / "model" / "README.md").read_text()
    for line in (
        "# SequenceClassifier",
        "| trained on | ListOps \\| flat |",
        "| test accuracy | 0.7371 |",
        "| loss | 1 |",
        "| density | 23.44 % of the pairs of tokens |",
        "| layer | head 0 | head 1 |",
        "| 1 | 50.00 % | 6.25 % |",
        f"| parameters | {sum(p.numel() for p in model.parameters()):,} |",
        'model = SequenceClassifier.from_pretrained("path/of/this/folder")',
    ):
        assert line in card.splitlines(), line
    assert json.loads((tmp_path / "model" / "config.json").read_text())["trained"] == {
        "task": "ListOps | flat",
        "metric": {"test accuracy": 0.7371, "loss": 1},
        "density": density.tolist(),
    }
    model.save_pretrained(tmp_path / "model", density=0.2)
    assert "| density | 20.00 % of the pairs of tokens |" in (tmp_path / "model" / "README.md").read_text().splitlines()


def test_card_states_how_to_import_the_class(saved: Path, tmp_path: Path) -> None:
    Doubled(encoder(), 2).save_pretrained(tmp_path / "doubled")
    for folder, line in (
        (saved, "from sbm_pyg import SequenceClassifier"),
        (tmp_path / "doubled", "# first import Doubled from the module that defines it"),
    ):
        assert f"```python\n{line}\n\nmodel = " in (folder / "README.md").read_text()


def test_card_says_what_was_not_stated(saved: Path) -> None:
    rows = (saved / "README.md").read_text().splitlines()
    assert {"| trained on | not stated |", "| metric | not stated |", "| density | not stated |"} <= {*rows}


@pytest.mark.parametrize(
    "density", [1.5, -0.1, float("nan"), [0.5, 0.5], torch.full((2, 3, 2), 0.5), torch.empty(0, 2)]
)
def test_impossible_densities_are_refused(density: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("Expected 'density' to be a number or [L, H] in [0, 1]")):
        encoder().save_pretrained(tmp_path / "model", density=density)
    assert not os.listdir(tmp_path)


def test_infinite_options_come_back(tmp_path: Path) -> None:
    model = encoder(attention_options={"num_blocks": 2, "probes": math.inf})
    model.save_pretrained(tmp_path / "model")
    again = SequenceEncoder.from_pretrained(tmp_path / "model")
    assert again.constructor_options() == model.constructor_options()
    layer: Any = again.layers[0].attention
    assert layer.estimator.probes == math.inf
    json.loads((tmp_path / "model" / "config.json").read_text(), parse_constant=pytest.fail)  # standard JSON


def test_metrics_are_numbers_of_any_library(tmp_path: Path) -> None:
    metric: dict[str, Any] = {
        "plain": 3, "torch": torch.tensor(0.25, requires_grad=True), "numpy": np.float32(0.5), "array": np.array(0.75),
    }  # fmt: skip
    encoder().save_pretrained(tmp_path / "model", metric=metric)
    saved = json.loads((tmp_path / "model" / "config.json").read_text())["trained"]["metric"]
    assert saved == {"plain": 3, "torch": 0.25, "numpy": 0.5, "array": 0.75}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (math.nan, ValueError, "Expected 'metric' to hold a finite number for 'accuracy' (got nan). Leave it out."),
        (torch.tensor(-math.inf), ValueError, "Expected 'metric' to hold a finite number for 'accuracy' (got -inf)."),
        ("0.5", TypeError, "Expected 'metric' to hold a number for 'accuracy' (got '0.5')."),
        (torch.ones(2), TypeError, "Expected 'metric' to hold a number for 'accuracy' (got tensor([1., 1.]))."),
        (10**400, TypeError, "Expected 'metric' to hold a number for 'accuracy' (got 1000"),
        (torch.tensor(1 + 2j), TypeError, "Expected 'metric' to hold a number for 'accuracy' (got tensor(1.+2.j))."),
    ],
)
def test_metrics_that_are_no_numbers_are_refused(
    value: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        encoder().save_pretrained(tmp_path / "model", metric={"accuracy": value})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": 0.5}, "Expected 'metric' to be a dict of numbers (got 0.5)."),
        ({"density": "x"}, "Expected 'density' to be a number or [L, H] (got 'x')."),
        ({"density": [[0.1], [0.1, 0.2]]}, "Expected 'density' to be a number or [L, H] (got [[0.1], [0.1, 0.2]])."),
    ],
)
def test_what_a_card_cannot_say_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        encoder().save_pretrained(tmp_path / "model", **options)
    assert not (tmp_path / "model").exists()


def test_numbers_of_numpy_are_options(tmp_path: Path) -> None:
    model = SequenceEncoder(
        15, 16, num_layers=1, attention_options={"num_blocks": np.int64(4), "dropout": np.float32(0.5)}
    )
    model.save_pretrained(tmp_path / "model")
    assert SequenceEncoder.from_pretrained(tmp_path / "model").constructor_options()["attention_options"] == {
        "num_blocks": 4,
        "dropout": 0.5,
    }


# ------------------------------------------------------------------------------------------------ whole or not at all


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("failing", ["weights", "config", "card", "publish"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failing_write_leaves_what_was_there(
    failing: str, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    if existing:
        SequenceClassifier(encoder(), 10).save_pretrained(folder)
    before = content(folder) if existing else {}

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    def fail_publishing(source: Any, target: Any, rename: Callable[..., None] = os.rename) -> None:
        if str(source).endswith("partial"):
            fail()
        rename(source, target)

    if failing == "weights":
        monkeypatch.setattr(safetensors.torch, "save_file", fail)
    elif failing == "config":
        monkeypatch.setattr(pretrained, "_sha256", fail)
    elif failing == "card":
        monkeypatch.setattr(pretrained, "_card", fail)
    else:
        monkeypatch.setattr(os, "rename", fail_publishing)
    message = f"Expected 'folder' to be writable (got '{folder}': disk full). Free some space"
    with pytest.raises(ValueError, match=re.escape(message)):
        SequenceClassifier(encoder("full"), 3).save_pretrained(folder)
    assert os.listdir(tmp_path) == (["model"] if existing else [])
    monkeypatch.undo()
    if existing:
        assert content(folder) == before
        assert SequenceClassifier.from_pretrained(folder).num_classes == 10


def test_saving_again_replaces_the_whole_model(saved: Path) -> None:
    TokenClassifier(encoder("full"), 3).save_pretrained(saved, task="another")
    assert sorted(os.listdir(saved)) == FILES
    assert os.listdir(saved.parent) == ["model"]
    assert TokenClassifier.from_pretrained(saved).num_classes == 3
    assert "another" in (saved / "README.md").read_text()


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would be left in a folder that is gone."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Expected 'folder' to be another one than the current folder"):
        SequenceClassifier(SequenceEncoder(9, 8), 2).save_pretrained(".")
    assert Path.cwd() == tmp_path.resolve()


def test_options_are_those_of_the_constructor_though_the_caller_changes_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 4, "sbm_options": {"parameterization": "assortative"}}
    model = SequenceClassifier(SequenceEncoder(9, 8, attention_options=options), 2)
    options["sbm_options"]["parameterization"] = "overlapping"
    model.save_pretrained(tmp_path / "model")
    again = SequenceClassifier.from_pretrained(tmp_path / "model")
    assert cast(Any, again).encoder.layers[0].attention.sbm.parameterization == "assortative"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    encoder().save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == FILES


@pytest.mark.parametrize("names", [["notes.txt"], ["README.md"], [*FILES, "notes.txt"], FILES])
def test_other_content_is_never_replaced(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        ValueError,
        match=re.escape(f"Expected 'folder' to be new, empty or a saved model (got '{tmp_path}', which holds "),
    ):
        encoder().save_pretrained(tmp_path)
    assert content(tmp_path) == dict.fromkeys(names, b"{}")
    with pytest.raises(ValueError, match="Expected 'folder' to be new"):
        encoder().save_pretrained(tmp_path / names[0])


def attend(channels: int, head_channels: int, heads: int) -> nn.Module:
    return FullAttention(channels, head_channels, heads)


def test_what_is_not_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=re.escape("Expected 'SequenceEncoder.attention' to be plain data (got <function attend")
    ):
        SequenceClassifier(encoder(attend), 10).save_pretrained(tmp_path / "model")
    with_bias = encoder(attention_options={"num_blocks": 2, "score_bias": max})
    with pytest.raises(
        TypeError,
        match=re.escape(
            "Expected 'SequenceEncoder.attention_options.score_bias' to be plain data (got <built-in function max>)"
        ),
    ):
        with_bias.save_pretrained(tmp_path / "model")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("wrapper", [torch.compile, torch.nn.utils.parametrizations.weight_norm])
def test_a_wrapped_part_is_refused(wrapper: Any, tmp_path: Path) -> None:
    """Its weights have names that the constructor does not make again."""
    model: Any = encoder()
    model.layers[0].ffn[0] = wrapper(model.layers[0].ffn[0])
    with pytest.raises(ValueError, match=r"Expected 'layers.0.ffn.0.* to have the name"):
        model.save_pretrained(tmp_path / "model")
    assert not os.listdir(tmp_path)


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Counting(Doubled):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

    message = "Expected '_extra_state' to be a tensor (got dict). No file of weights holds anything else"
    with pytest.raises(TypeError, match=re.escape(message)):
        Counting(encoder(), 2).save_pretrained(tmp_path / "model")
    assert not os.listdir(tmp_path)


def test_a_text_that_stands_for_infinity_is_refused(tmp_path: Path) -> None:
    model = encoder(attention_options={"num_blocks": 2})
    model._options["attention_options"] = {"norm": "inf"}
    with pytest.raises(ValueError, match=re.escape("Expected 'SequenceEncoder.attention_options.norm' not to be the")):
        model.save_pretrained(tmp_path / "model")
    assert not os.listdir(tmp_path)


def test_a_class_without_options_says_so(tmp_path: Path) -> None:
    class Silent(Pretrained):
        pass

    with pytest.raises(
        NotImplementedError, match=re.escape("Silent has no constructor options. Define `constructor_options`")
    ):
        Silent().save_pretrained(tmp_path / "model")


def test_models_load_where_tensors_are_made_on_no_device(tmp_path: Path) -> None:
    model = encoder(attention_options={"num_blocks": 2, "target_density": 0.5}).eval()
    model.save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        again = SequenceEncoder.from_pretrained(tmp_path / "model")
    assert torch.equal(run(again), run(model))


# ------------------------------------------------------------------------------------------------ misfits


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ValueError, match=re.escape(f"Expected '{saved / name}' to be a file (got none)")):
        SequenceClassifier.from_pretrained(saved)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"Expected '{tmp_path / 'nowhere' / 'config.json'}' to be a file (got none)")
    ):
        Pretrained.from_pretrained(tmp_path / "nowhere")


def test_changed_weights_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"Expected '{weights}' to have the SHA-256 ")):
        SequenceClassifier.from_pretrained(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "999.0.0"}, f"to be at most {pretrained.__version__} (got 999.0.0). Update your clone."),
        ({"version": f"{pretrained.__version__}.1"}, "Update your clone"),
        ({"class": "PairedClassifier"}, "(got 'PairedClassifier'). Import the module that defines it first."),
        ({"class": "TokenClassifier"},
         "to be one of ['SequenceClassifier'] (got 'TokenClassifier'). Load it with `TokenClassifier.from_pretrained`."),
        ({"class": "_PoolingHead"}, "(got '_PoolingHead')"),
        ({"class": None}, "(got None)"),
        ({"options": None}, "Expected 'options' in "),
        ({"options": {"num_classes": 10}}, "to fit SequenceClassifier (got "),
        ({"options": {"encoder": {"class": "SequenceEncoder", "options": {"colour": 1}}, "num_classes": 10}},
         "to fit SequenceEncoder (got "),
        ({"options": {"encoder": {"class": "SequenceEncoder", "options": {"num_tokens": 0}}, "num_classes": 10}},
         "Expected 'num_tokens' to be at least 1"),
        ({"options": {"encoder": {"class": "SequenceEncoder", "options": {"num_tokens": 15}}, "num_classes": 10}},
         "to fit SequenceEncoder (got ValueError: it makes "),
        ({"options": {"encoder": {"class": "SequenceClassifier", "options": {}}, "num_classes": 10}}, "to fit SequenceClassifier (got "),
        ({"options": {"encoder": {"class": "SequenceEncoder", "options": {"num_tokens": 15, "dropout": 2.0}}, "num_classes": 10}},
         "Expected 'dropout' in [0, 1"),
        ({"options": {"encoder": {"class": "SequenceEncoder", "clazz": 1, "options": {}}, "num_classes": 10}}, "to have the keys 'class' and 'options'"),
        ({"library": "transformers"}, "to be the config of a model of sbm_pyg (got another one)"),
        ({"sha256": None}, "to be the config of a model of sbm_pyg (got another one)"),
        ({"sha256": {}}, "to have the SHA-256 None"),
    ],
)  # fmt: skip
def test_misfits_are_told(saved: Path, changes: dict[str, Any], message: str) -> None:
    SequenceClassifier.from_pretrained(saved)
    edit(saved, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        SequenceClassifier.from_pretrained(saved)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\x00", b"null", b"\xff\xfe", b"[" * 5000])
def test_a_config_that_is_none_is_told(saved: Path, text: bytes) -> None:
    (saved / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(f"Expected '{saved / 'config.json'}' to be ")):
        Pretrained.from_pretrained(saved)


def test_older_versions_are_read(saved: Path) -> None:
    edit(saved, version="0.0.9")
    assert SequenceClassifier.from_pretrained(saved).num_classes == 10


SHARE = "encoder.layers.0.attention.source.share"
FOREIGN: dict[str, Callable[[dict[str, Tensor]], bytes]] = {
    "no safetensors": lambda state: b"no header, and no tensors", "nothing": lambda state: b"", "zeros": lambda state: b"\0" * 99,
    "cut off": lambda state: safetensors.torch.save(state)[:-8],
    "of another model": lambda state: safetensors.torch.save({"weight": torch.ones(3)}),
    "one missing": lambda state: safetensors.torch.save(dict([*state.items()][1:])),
    "another shape": lambda state: safetensors.torch.save({name: value[:1].clone() for name, value in state.items()}),
    "integers": lambda state: safetensors.torch.save({name: value.long() for name, value in state.items()}),
    "fp8": lambda state: safetensors.torch.save({**state, "encoder.norm.bias": torch.ones(16, dtype=torch.float8_e5m2)}),
    "a share of three": lambda state: safetensors.torch.save({**state, SHARE: torch.full((3,), 0.5)}),
    "a share of two": lambda state: safetensors.torch.save({**state, SHARE: torch.tensor(2.0)}),
    "complex": lambda state: safetensors.torch.save({name: value.to(torch.complex64) for name, value in state.items()}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_weights_are_told(saved: Path, kind: str) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(FOREIGN[kind](safetensors.torch.load_file(weights)))
    edit(saved, sha256={"model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()})
    with pytest.raises(
        ValueError, match=f"(?s)^Expected .*'{re.escape(str(saved))}/.* (Restore .* saved|Save the model)"
    ):
        SequenceClassifier.from_pretrained(saved)


def test_weights_of_eight_bits_are_refused(tmp_path: Path) -> None:
    model = encoder()
    model.norm.weight.data = model.norm.weight.data.to(torch.float8_e4m3fn)
    message = "Expected 'norm.weight' to be of at least 16 bits (got torch.float8_e4m3fn). Save the model in bfloat16"
    with pytest.raises(ValueError, match=re.escape(message)):
        model.save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("sizes", [{"num_layers": 50_000}, {"max_length": 10**6}])
def test_no_more_is_made_than_the_weights_have(sizes: dict[str, int], saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["options"]["encoder"]["options"].update(sizes)
    edit(saved, **config)
    with pytest.raises(
        ValueError, match=r"to fit SequenceEncoder \(got ValueError: it makes (\d{1,3}|1,\d{3}) parameters"
    ):
        SequenceClassifier.from_pretrained(saved)
    assert SequenceEncoder(15, 256).position.weight.numel() > 20_000  # not any more


def test_what_another_thread_makes_is_not_counted(saved: Path) -> None:
    weights = saved / "model.safetensors"
    with pretrained._limit_parameters(weights), ThreadPoolExecutor(1) as pool:
        pool.submit(nn.Linear, 1000, 1000).result()
        with pytest.raises(ValueError, match="it makes 1 parameters or more, of 1,000,000 numbers"):
            nn.Linear(1000, 1000)


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; the first file is written by safetensors, which has errors of its own."""
    model = encoder()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        model.save_pretrained(tmp_path / "model")

    said = in_a_fork(limited)
    assert f"ValueError: Expected 'folder' to be writable (got '{tmp_path / 'model'}': " in said
    assert "File too large" in said
    assert not os.listdir(tmp_path)


# ------------------------------------------------------------------------------------------------ damaged configs

VALUES = {  # as JSON has them; Python's own also reads NaN
    "null": "null", "list": "[1, [2]]", "empty list": "[]", "object": '{"a": 1}', "empty object": "{}", "text": '""', "true": "true",
    "deep": "[" * 100_000 + "]" * 100_000, "less deep": '{"a":' * 300 + "1" + "}" * 300, "nan": "NaN", "infinity": "-Infinity", "1e400": "1e400",
    "huge": "9" * 5000, "large": str(2**62), "negative": "-1", "many digits": f'"{"9" * 5000}"',
}  # fmt: skip


def places(config: Any, way: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The way to each key of a config."""
    if not isinstance(config, dict):
        return []
    return [found for key, value in config.items() for found in ((*way, key), *places(value, (*way, key)))]


def damaged(config: dict[str, Any], way: tuple[str, ...], change: str) -> str:
    """The text of a config in which one key is gone, named otherwise, or has one of VALUES."""
    config = copy.deepcopy(config)
    holder = functools.reduce(dict.__getitem__, way[:-1], config)
    value = holder.pop(way[-1])
    if change == "renamed":
        holder[way[-1][::-1]] = value
    elif change != "deleted":
        holder[way[-1]] = "@"
    return json.dumps(config).replace('"@"', VALUES.get(change, ""))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("small") / "model"
    options = {"num_blocks": 2, "dropout": 0.1, "window": 3}
    small = SequenceEncoder(5, 4, num_layers=1, heads=1, max_length=3, dropout=0.2, attention_options=options)
    SequenceClassifier(small, 2).save_pretrained(folder, task="small", metric={"loss": 1.5}, density=[[0.25]])
    return folder, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("change", ["deleted", "renamed", *VALUES])
def test_a_damaged_config_is_read_or_told(small: tuple[Path, dict[str, Any]], change: str) -> None:
    """Each key: what is read is a model without NaN, and what is not ends in one kind of error that names the file."""
    folder, config = small
    told = {}
    for way in places(config):
        (folder / "config.json").write_text(damaged(config, way, change))
        try:
            model = SequenceClassifier.from_pretrained(folder)
        except ValueError as error:
            told[way] = str(error)
        else:
            assert "nan" not in repr(model.constructor_options()), way
            assert model.encoder.dropout.p <= 1, way
    assert len(told) >= 8
    for way, message in told.items():
        assert re.match(
            rf"(?s)Expected .*'{re.escape(str(folder))}/(config.json|model.safetensors)'.*\(got .*\)\. \w.*\.$", message
        ), (way, message)


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        (("options", "encoder", "class"), "renamed", "Expected 'options.encoder' in '{}' to have the keys 'class' and 'options' (got ['"),
        (("options", "encoder", "options"), "deleted", "Expected 'options.encoder' in '{}' to have the keys 'class' and 'options' (got ['class'])"),
        (("options", "encoder", "class"), "list", "Expected 'options.encoder.class' in '{}' to be one of ["),
        (("class",), "list", "Expected 'class' in '{}' to be one of ['SequenceClassifier'] (got [1, [2]]). Import the module"),
        (("options", "encoder"), "null", "Expected 'options' in '{}' to fit SequenceClassifier (got TypeError: Expected 'encoder' to be a SequenceEncoder"),
        (("options", "encoder", "options", "dropout"), "nan", "Expected 'options.encoder.options.dropout' in '{}' to be a finite number (got nan)."),
        (("options", "encoder", "options", "dropout"), "1e400", "Expected 'options.encoder.options.dropout' in '{}' to be a finite number (got inf)."),
        (("options", "num_classes"), "huge", "Expected 'options.num_classes' in '{}' to be a finite number (got inf)."),
        (("options", "encoder", "options", "num_layers"), "large", "Expected 'options.encoder.options' in '{}' to fit SequenceEncoder (got ValueError: "),
        (("version",), "many digits", "Expected 'version' in '{}' to be one such as '"),
        (("version",), "deleted", "Expected 'version' in '{}' to be one such as '"),
        (("options",), "deep", "Expected '{}' to be JSON (got "),
    ],
)  # fmt: skip
def test_a_damaged_config_is_told_by_key(
    small: tuple[Path, dict[str, Any]], way: tuple[str, ...], change: str, message: str
) -> None:
    folder, config = small
    (folder / "config.json").write_text(damaged(config, way, change))
    with pytest.raises(ValueError, match=re.escape(message.format(folder / "config.json"))):
        SequenceClassifier.from_pretrained(folder)


def test_options_that_look_like_a_model_are_refused(tmp_path: Path) -> None:
    model = encoder(attention_options={"num_blocks": 2})
    model._options["attention_options"] = {"class": "x"}
    with pytest.raises(
        ValueError,
        match=re.escape(
            "Expected 'SequenceEncoder.attention_options' to have no key 'class' or 'options' (got ['class'])"
        ),
    ):
        model.save_pretrained(tmp_path / "model")
