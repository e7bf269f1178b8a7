"""Models in folders and on the Hub: what goes in comes out, without network and without code, and misfits are refused."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from sbm_pyg import (
    ALiBi,
    DensitySource,
    MaskedLM,
    PairClassifier,
    Pretrained,
    SequenceClassifier,
    SequenceEncoder,
    TokenClassifier,
    estimators,
)
from sbm_pyg.layers.dense import FullAttention
from sbm_pyg.models import pretrained  # fmt: skip

PTR = torch.tensor([0, 10, 17, 30])
TOKENS = torch.randint(0, 15, (30,), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, dict[str, Any]] = {
    "sbm": {"num_clusters": 4, "dropout": 0.1, "target_density": 0.4, "cluster_init": "orthogonal"}, "full": {"dropout": 0.1},
    "window": {"size": 2}, "bigbird": {"num_random": 1},
}  # fmt: skip
FILES = ["README.md", "config.json", "model.safetensors"]


class Doubled(TokenClassifier):
    """A model of a user."""


class Odd(Pretrained):
    """Models in a list, a function as default, any other option, a parameter under two names, shared memory, and what no file holds."""

    def __init__(self, encoders: Any, activation: Any = torch.relu, *, sizes: Any = (1,), **more: Any) -> None:
        super().__init__()
        self.encoders, self.activation, self.sizes, self.more = nn.ModuleList(encoders), activation, sizes, more
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.lazy = Linear(-1, 3)
        whole = torch.arange(8.0)
        self.left, self.right = nn.Parameter(whole[:3]), nn.Parameter(whole[3::2], requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("table", torch.arange(3), persistent=False)


def encoder(attention: Any = "sbm", **options: Any) -> SequenceEncoder:
    torch.manual_seed(0)
    named = {"attention_options": OPTIONS[attention]} if isinstance(attention, str) else {}
    return SequenceEncoder(15, 16, attention=attention, max_length=40, **(named | options))


def odd() -> Odd:
    model = Odd([encoder(), encoder("window")], sizes=[3], extra={"deep": [1, {"a": 2.5}]})
    model.lazy(torch.ones(1, 4))
    return model


MODELS: dict[str, Callable[[], Pretrained]] = {
    **{f"encoder, {name}": partial(encoder, name, head_channels=4, ffn_channels=24, dropout=0.3) for name in OPTIONS},
    "sequences": lambda: SequenceClassifier(encoder(heads=1, num_layers=1), 3), "pairs": lambda: PairClassifier(encoder("full"), 4, pool_length=9),
    "tokens": lambda: TokenClassifier(encoder("bigbird"), 5), "subclass": lambda: Doubled(encoder(), 2),
    "masked": lambda: MaskedLM(encoder(position_encoding="rotary")), "odd": odd,
}  # fmt: skip


def run(model: Any) -> Tensor:
    if isinstance(model, Odd):
        return model.encoders[1](TOKENS, PTR)
    tokens, ptr = ((TOKENS, TOKENS.flip(0)), (PTR, PTR)) if isinstance(model, PairClassifier) else (TOKENS, PTR)
    return model(tokens, ptr, seed=3)


def check_equal(model: Pretrained, other: Pretrained) -> None:
    assert type(other) is type(model)
    assert repr(other) == repr(model)  # dropout rates, widths and target densities among others
    state = other.state_dict()
    assert {name: value.dtype for name, value in state.items()} == {n: v.dtype for n, v in model.state_dict().items()}
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    assert torch.equal(run(other.eval()), run(model.eval()))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    SequenceClassifier(encoder(), 10).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip(name: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[name]().to(dtype)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    model.save_pretrained(tmp_path / "deep" / "model")
    again = type(model).from_pretrained(str(tmp_path / "deep" / "model"))
    assert model.training
    assert not again.training
    assert torch.equal(torch.get_rng_state(), state)
    for other in (again, before, pickle.loads(pickle.dumps(model))):
        check_equal(model, other)
        other.save_pretrained(tmp_path / "deep" / "model")  # in the place of the first
        check_equal(model, type(model).from_pretrained(tmp_path / "deep" / "model"))
    assert sorted(os.listdir(tmp_path / "deep" / "model")) == FILES
    (tmp_path / "new").touch()
    assert {path.stat().st_mode for path in (tmp_path / "deep" / "model").iterdir()} == {
        (tmp_path / "new").stat().st_mode
    }
    assert not capsys.readouterr().out


def test_parts_that_are_shared_or_not_saved_come_back(tmp_path: Path) -> None:
    odd().save_pretrained(tmp_path)
    again = Odd.from_pretrained(tmp_path)
    assert again.first.weight is again.second.weight
    assert again.get_buffer("table").tolist() == [0, 1, 2]
    assert (again.activation, again.sizes, again.more) == (torch.relu, [3], {"extra": {"deep": [1, {"a": 2.5}]}})


def test_every_constructor_option_comes_back(tmp_path: Path) -> None:
    attention: dict[str, Any] = {
        "num_clusters": np.int64(2), "exploration": 0.5, "estimator": "local", "probes": math.inf,
        "budget": np.float32(3.5),
    }  # fmt: skip
    attention |= {"window": 1, "parameterization": "assortative"}
    sizes = {
        "channels": 12, "num_layers": 3, "heads": 3, "head_channels": 5, "ffn_channels": 7, "max_length": 11,
        "dropout": 0.25,
    }  # fmt: skip
    model = SequenceEncoder(9, attention_options=attention, is_causal=True, position_encoding="alibi", **sizes)  # type: ignore[arg-type]
    attention["parameterization"] = "overlapping"  # later changes do not count
    model.save_pretrained(tmp_path)
    plain = attention | {"num_clusters": 2, "budget": 3.5, "parameterization": "assortative"}
    wanted = sizes | {
        "num_tokens": 9, "attention": "sbm", "attention_options": plain, "is_causal": True,
        "position_encoding": "alibi", "in_channels": None,
    }  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text()) == wanted
    layer: Any = SequenceEncoder.from_pretrained(tmp_path).layers[2].attention
    source = layer.source
    assert (source.exploration, source.budget, source.window) == (0.5, 3.5, 1)
    assert (type(layer.estimator), layer.estimator.probes, type(layer.score_bias)) == (
        estimators.Local, math.inf, ALiBi,
    )  # fmt: skip
    assert (layer.source.head.parameterization, layer.is_causal, layer.heads) == ("assortative", True, 3)


def test_a_model_keeps_its_density_and_goes_on_learning(saved: Path) -> None:
    model = SequenceClassifier.from_pretrained(saved).train()
    for number, source in enumerate(part for part in model.modules() if isinstance(part, DensitySource)):
        source.target_density = 0.25 + number / 10
    run(model).sum().backward()
    run(model)
    model.save_pretrained(saved)
    again = SequenceClassifier.from_pretrained(saved)
    assert [part.target_density for part in again.modules() if isinstance(part, DensitySource)] == pytest.approx(
        [0.25, 0.35]
    )
    check_equal(model, again)
    run(again.train()).sum().backward()
    assert all(parameter.grad is not None for name, parameter in again.named_parameters() if "sbm" not in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_lie_where_torch_puts_its_own(saved: Path, dtype: torch.dtype) -> None:
    """Products of matrices may round otherwise elsewhere. Headers of all lengths put the numbers of the file at all places."""
    weights, state = saved / "model.safetensors", SequenceClassifier(encoder(), 10).to(dtype).state_dict()
    for spaces in range(0, 64, 8):
        safetensors.torch.save_file(state, weights, metadata={"space": " " * spaces})
        tensors = SequenceClassifier.from_pretrained(saved).state_dict()
        assert {tensor.data_ptr() % 64 for tensor in tensors.values()} == {0}
        assert all(
            torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype for name, tensor in state.items()
        )


@pytest.mark.parametrize("device", ["cpu", "meta", *["cuda"] * torch.cuda.is_available()])
def test_weights_go_to_the_device(saved: Path, device: str) -> None:
    with torch.device("meta"):  # tensors that a loaded model makes hold values all the same
        model = SequenceClassifier.from_pretrained(saved, map_location=device)
    assert {parameter.device.type for parameter in model.parameters()} == {device}


# ------------------------------------------------------------------------------------------------ the card and the Hub


def test_the_card_states_task_and_results(tmp_path: Path) -> None:
    model = SequenceClassifier(encoder(), 10)
    card = {"task": "ListOps", "results": {"test accuracy": 0.7371, "density": torch.tensor(0.25)}}
    model.save_pretrained(tmp_path, model_card_kwargs=card)
    lines = (tmp_path / "README.md").read_text().splitlines()
    use = 'model = SequenceClassifier.from_pretrained("path/of/this/folder")'
    wanted = {
        "library_name: sbm_pyg", "- sparse-attention", "# SequenceClassifier", "Trained on ListOps.",
        "* test accuracy: 0.7371", "* density: 0.25", use,
    }  # fmt: skip
    assert wanted <= {*lines}
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_folders_need_no_network_and_no_pickle(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was used")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save"), (socket, "getaddrinfo"),
                         (socket.socket, "connect"), (pretrained, "hf_hub_download")):  # fmt: skip
        monkeypatch.setattr(module, name, refuse)
    SequenceClassifier.from_pretrained(saved).save_pretrained(saved)


def test_models_go_to_the_hub_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are replaced by ones that copy files, and note what is asked for: no file but two, such as a pickle."""
    names = list[tuple[str, str, str]]()

    def upload(self: Any, *, repo_id: str, folder_path: Path, **_: Any) -> str:
        return str(shutil.copytree(folder_path, tmp_path / repo_id))

    def download(repo_id: str, filename: str, *, revision: str, **_: Any) -> str:
        names.append((repo_id, filename, revision))
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id)
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    for module in (huggingface_hub.hub_mixin, pretrained):
        monkeypatch.setattr(module, "hf_hub_download", download)
    model = SequenceClassifier(encoder(), 3)
    assert model.push_to_hub("me/model", model_card_kwargs={"task": "ListOps"}) == str(tmp_path / "me" / "model")
    assert sorted(os.listdir(tmp_path / "me" / "model")) == FILES
    assert "Trained on ListOps." in (tmp_path / "me" / "model" / "README.md").read_text()
    check_equal(model, SequenceClassifier.from_pretrained("me/model", revision="v1"))
    assert names == [("me/model", "config.json", "v1"), ("me/model", "model.safetensors", "v1")]


# ------------------------------------------------------------------------------------------------ what is refused


def attend(channels: int, head_channels: int, heads: int) -> nn.Module:
    return FullAttention(channels, head_channels, heads)


def wrapped(wrapper: Any) -> SequenceEncoder:
    model: Any = encoder()
    model.layers[0].ffn[0] = wrapper(model.layers[0].ffn[0])
    return model


class Counting(Doubled):
    def get_extra_state(self) -> Any:
        return {"steps": 3}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SequenceClassifier(encoder(attend), 2), TypeError, "Expected 'SequenceClassifier.encoder.attention' to be plain data (got <function attend"),
        (lambda: encoder(attention_options={"num_clusters": 2, "score_bias": max}), TypeError,
         "Expected 'SequenceEncoder.attention_options.score_bias' to be plain data (got <built-in function max>). A config holds no code"),
        (lambda: Odd([encoder(attend)]), TypeError, "Expected 'Odd.encoders[0].attention' to be plain data (got <function attend"),
        (lambda: Odd([], torch.tanh), TypeError, "Expected 'Odd.activation' to be plain data (got <built-in method tanh"),
        (lambda: Odd([], rate=math.nan), TypeError, "Expected 'Odd.rate' to be plain data (got nan)"),
        (lambda: Odd([], names={1: "a"}), TypeError, "Expected 'Odd.names' to be plain data (got {1: 'a'})"),
        (lambda: Odd([]), ValueError, "Expected 'lazy.weight' to be a dense tensor with values, of a module that is not wrapped (got Uninit"),
        (lambda: encoder().to("meta"), ValueError, "Expected 'token.weight' to be a dense tensor with values"),
        (lambda: wrapped(torch.compile), ValueError, "Expected 'layers.0.ffn.0._orig_mod.weight' to be a dense tensor with values, of a module"),
        (lambda: wrapped(torch.nn.utils.parametrizations.weight_norm), ValueError, "Expected 'layers.0.ffn.0.parametrizations.weight.original0'"),
        (lambda: Counting(encoder(), 2), ValueError, "Expected '_extra_state' to be a dense tensor with values, of a module that is not wrapped (got dict)"),
    ],
)  # fmt: skip
def test_what_would_not_come_back_is_not_saved(make: Any, error: type[Exception], message: str, saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(error, match=re.escape(message)):
        make().save_pretrained(saved)
    assert {path: path.read_bytes() for path in saved.iterdir()} == before


def config_with(**options: Any) -> Callable[[bytes], bytes]:
    """Change options of the encoder."""
    return lambda content: json.dumps((whole := json.loads(content)) | {"encoder": whole["encoder"] | options}).encode()


def state_with(change: Callable[[Tensor], Tensor]) -> Callable[[bytes], bytes]:
    """Change all weights."""
    return lambda content: safetensors.torch.save({k: change(v) for k, v in safetensors.torch.load(content).items()})


MISFITS: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "no config": ("config.json", None, "TypeError"), "no weights": ("model.safetensors", None, "FileNotFoundError"),
    "no JSON": ("config.json", lambda content: content[:-2], "JSONDecodeError"), "no text": ("config.json", lambda content: b"\xff\xfe", "UnicodeDecodeError"),
    "a list": ("config.json", lambda content: b"[]", "Error: "), "null": ("config.json", lambda content: b"null", "Error: "),
    "deep": ("config.json", lambda content: b"[" * 100_000, "RecursionError"),
    "an unknown class": ("config.json", config_with(_class_name="Other"), "Expected '_class_name' to be one of ['"),
    "another class": ("config.json", config_with(_class_name="Doubled"), "TypeError"),
    "an unknown option": ("config.json", config_with(color=1), "unexpected keyword argument 'color'"),
    "a wrong option": ("config.json", config_with(dropout=2.0), "Expected 'dropout' in [0, 1"),
    "other sizes": ("config.json", config_with(channels=8), "size mismatch for encoder.token.weight"),
    "more layers": ("config.json", config_with(num_layers=3), "Missing key(s) in state_dict"),
    "less layers": ("config.json", config_with(num_layers=1), "Unexpected key(s) in state_dict"),
    "no safetensors": ("model.safetensors", lambda content: b"no header, and no tensors", "SafetensorError"),
    "weights cut off": ("model.safetensors", lambda content: content[:-8], "SafetensorError"),
    "integers": ("model.safetensors", state_with(lambda tensor: tensor.long() if tensor.dim() else tensor), "RuntimeError: data set to a tensor"),
    "one number of each": ("model.safetensors", state_with(lambda tensor: tensor.flatten()[:1].clone()), "size mismatch for"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_misfits_are_told(saved: Path, kind: str) -> None:
    name, change, message = MISFITS[kind]
    content = (saved / name).read_bytes()
    (saved / name).unlink()
    if change is not None:
        (saved / name).write_bytes(change(content))
    words = rf"(?s)^Expected '{re.escape(str(saved))}' to be the folder of a SequenceClassifier \(got .*{re.escape(message)}.*\. Load it by"
    with pytest.raises(ValueError, match=words):
        SequenceClassifier.from_pretrained(saved)


def test_other_folders_and_classes_are_told(saved: Path) -> None:
    with pytest.raises(ValueError, match=f"Expected '{saved.parent}/nowhere' to be the folder of a SequenceClassifier"):
        SequenceClassifier.from_pretrained(saved.parent / "nowhere")
    with pytest.raises(ValueError, match=f"(?s)Expected '{saved}' to be the folder of a TokenClassifier .*Missing key"):
        TokenClassifier.from_pretrained(saved)
    with pytest.raises(huggingface_hub.errors.HFValidationError):  # a text that is no folder is a name on the Hub
        SequenceClassifier.from_pretrained(str(saved.parent / "nowhere"))
