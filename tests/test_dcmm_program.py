"""The program of the DCMM-Transformer: its images, its models, weights of timm, and that it can be stopped anywhere."""

import dataclasses
import math
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems import same
from test_recall import generator
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from examples.common.tables import read
from examples.dcmm import __main__ as program
from examples.dcmm import data, model, pictures, train
from sbm_pyg import AttentionConv, AttentionGraph, DCMMBias, auxiliary_loss
from sbm_pyg.sources import patterns

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("one_thread")]

SIZES: dict[str, Any] = {"patch": 4, "channels": 8, "layers": 2, "heads": 2, "ffn": 32}
RUN = train.Run(
    "digits", "full", 1, "last", None, **SIZES, steps=6, batch_size=4, learning_rate=1e-3, validation=0.2, evaluations=3
)
FEW = "num_clusters=3"
METHODS = (
    "full", f"dcmm:{FEW}", f"sbm:{FEW}", f"sbm:{FEW},estimator=mask,control=fixed", f"dcsbm:{FEW}", f"dcmm-sbm:{FEW}",
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> data.Images:
    """Five images of each digit."""
    digits = data.load("digits")
    few = [
        torch.cat([(x == digit).nonzero()[:5, 0] for digit in range(10)])
        for x in (digits.train_labels, digits.test_labels)
    ]
    train_, test = few
    found = data.Images(
        digits.train[train_], digits.train_labels[train_], digits.test[test], digits.test_labels[test], digits.classes
    )
    monkeypatch.setattr(data, "load", lambda name, size=None: found)
    return found


# ---------------------------------------------------------------- images


def test_digits_are_split_in_equal_shares_without_overlap() -> None:
    digits = data.load("digits")
    assert digits.train.shape == (1497, 1, 8, 8)
    assert digits.test.shape == (300, 1, 8, 8)
    assert int(digits.train.max()) == 255
    kept, held = data.split(digits.train_labels, 0.2, 3)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(1497))
    whole = torch.bincount(digits.train_labels)
    assert bool(((torch.bincount(digits.train_labels[held]) - 0.2 * whole).abs() <= 1).all())
    assert torch.equal(held, data.split(digits.train_labels, 0.2, 3)[1])
    assert not torch.equal(held, data.split(digits.train_labels, 0.2, 4)[1])


@pytest.mark.needs_data
def test_cifar_as_released(sample: Callable[..., Path]) -> None:
    found = data.load(str(sample("cifar10", "cifar-10-batches-py")))
    assert found.train.shape == (1000, 3, 32, 32)
    assert found.test.shape == (300, 3, 32, 32)
    assert len(found.classes) == int(found.train_labels.max()) + 1 == 10
    sized = data.load(str(sample("cifar10", "cifar-10-batches-py")), 16)
    assert sized.train.shape == (1000, 3, 16, 16)
    means = [x.train.double().mean((2, 3)) for x in (found, sized)]
    assert float((means[0] - means[1]).abs().max()) < 4


def make_folder(root: Path, parts: tuple[str, ...], count: int = 6) -> Path:
    """Images of two classes, one color each on the left and black on the right, the wider the later."""
    for part in parts:
        for name, color in (("cat", (200, 0, 0)), ("dog", (0, 100, 0))):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (20 + number, 10), color)
                image.paste((0, 0, 0), (10, 0, 20 + number, 10))
                image.save(root / part / name / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("parts", "sizes"), [(("",), (10, 2)), (("train", "test"), (12, 12)), (("train", "val", "test"), (24, 12))]
)
def test_folders_of_classes(parts: tuple[str, ...], sizes: tuple[int, int], tmp_path: Path) -> None:
    found = data.load(str(make_folder(tmp_path, parts)), 16)
    assert found.classes == ("cat", "dog")
    assert (len(found.train), len(found.test)) == sizes
    for images, labels in ((found.train, found.train_labels), (found.test, found.test_labels)):
        assert images.shape[1:] == (3, 16, 16)
        assert not bool(images[..., 12:].any())
        color = images[..., :4].float().mean((2, 3))
        assert torch.equal(color, torch.tensor([[200.0, 0, 0], [0, 100, 0]])[labels])


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("bias", ["last", "all"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_as_many_parameters_and_gradients(method: str, bias: str, small: data.Images) -> None:
    sizes = {**SIZES, "ffn": 256}
    full = train.make_model(dataclasses.replace(RUN, **sizes), small).count()
    made = train.make_model(dataclasses.replace(RUN, method=method, bias=bias, **sizes), small)
    assert abs(made.count() / full - 1) < 0.01
    assert [number for number, _ in made.attention] == ([] if method == "full" else [1] if bias == "last" else [0, 1])
    logits, density = made(small.train[:8], seed=0)
    (logits.square().sum() + auxiliary_loss(made)).backward()
    missing = [name for name, x in made.named_parameters() if x.grad is None or not bool(x.grad.isfinite().all())]
    assert not missing
    assert float(density.detach()) == 1 if method in ("full", METHODS[1]) else 0 < float(density.detach()) < 0.9


def test_plain_attention_is_that_over_all_pairs() -> None:
    torch.manual_seed(0)
    plain = model.make_vision_attention("full", 8, 4, 2)
    conv = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.full))
    conv.load_state_dict(plain.state_dict())
    x, ptr = torch.randn(12, 8), torch.tensor([0, 5, 12])
    torch.testing.assert_close(conv(x, ptr=ptr), plain(x, ptr=ptr))


def test_options_reach_the_layers(small: data.Images) -> None:
    words = "dcmm:degree=softplus,squash=0,symmetric=1,tied=0,num_clusters=5,entropy_weight=0.3"
    bias: Any = model.make_vision_attention(words, 8, 4, 2).score_bias
    assert (bias.degree, bias.squash, bias.symmetric, bias.tied) == ("softplus", False, True, False)
    assert (bias.num_clusters, bias.entropy_weight) == (5, 0.3)
    assert bias.scale == 10
    usual: Any = model.make_vision_attention("dcmm-sbm", 8, 4, 2)
    assert (usual.score_bias.degree, usual.score_bias.entropy_weight, usual.source.target_density) == (
        "relu", 0.1, 0.25,
    )  # fmt: skip
    corrected: Any = model.make_vision_attention("dcsbm:density=0,estimator=mask", 8, 4, 2)
    assert corrected.source.head.degree_corrected
    assert corrected.source.target_density is None
    assert type(corrected.estimator).__name__ == "Mask"


def test_images_are_cut_into_patches() -> None:
    made = model.Vision("full", (3, 8), 2, **SIZES)
    images = torch.randint(256, (2, 3, 8, 8), generator=generator(), dtype=torch.uint8)
    tokens, ptr = made.tokens(images)
    assert ptr.tolist() == [0, 5, 10]
    assert not bool(tokens[[0, 5]].any())
    torch.testing.assert_close(tokens[5 + 3], images[1, :, 4:, :4].flatten() / 255)


# ---------------------------------------------------------------- weights of timm


def make_state(
    channels: int = 128, layers: int = 2, patch: int = 4, side: int = 2, colors: int = 3
) -> dict[str, Tensor]:
    """Names and shapes as those of ``timm.create_model("vit_small_patch16_224").state_dict()``, in small."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, channels), "pos_embed": (1, 1 + side**2, channels),
        "patch_embed.proj.weight": (channels, colors, patch, patch), "patch_embed.proj.bias": (channels,), "head.weight": (5, channels),
        "head.bias": (5,),
    }  # fmt: skip
    lines = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (2, 1), "mlp.fc2": (1, 2)}
    for name, (wide, deep) in ((f"blocks.{at}.{name}", size) for at in range(layers) for name, size in lines.items()):
        shapes |= {f"{name}.weight": (wide * channels, deep * channels), f"{name}.bias": (wide * channels,)}
    for name in ("norm", *(f"blocks.{at}.norm{each}" for at in range(layers) for each in (1, 2))):
        shapes |= {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}
    random = generator()
    return {name: 0.1 * torch.randn(shape, generator=random) for name, shape in shapes.items()}


def dense_vit(state: dict[str, Tensor], images: Tensor, heads: int) -> Tensor:
    """What a vision transformer of timm computes from images ``[B, 3, H, W]``, written from its definition."""
    x = torch.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=4).flatten(2).mT
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (x.size(-1),), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def lin(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    for at in range(2):
        name = f"blocks.{at}"
        fused = lin(norm(x, f"{name}.norm1"), f"{name}.attn.qkv")
        q, k, v = fused.reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v
        x = x + lin(attended.transpose(1, 2).flatten(2), f"{name}.attn.proj")
        x = x + lin(gelu(lin(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
    return lin(norm(x, "norm")[:, 0], "head")


def test_weights_of_timm_make_the_same_network() -> None:
    state = {name: x.double() for name, x in make_state().items()}
    sizes = model.sizes_of(state)
    assert sizes == {"patch": 4, "channels": 128, "layers": 2, "heads": 2, "ffn": 256, "size": 8}
    options: dict[str, Any] = {name: size for name, size in sizes.items() if name != "size"}
    made = model.Vision("full", (3, 8), 5, **options).double()
    model.load_weights(made, state)
    images = torch.randint(256, (3, 3, 8, 8), generator=generator(), dtype=torch.uint8)
    made.mean.fill_(0.25)
    wanted = dense_vit(state, images.double() / 255 - 0.25, 2)
    torch.testing.assert_close(made(images)[0], wanted, rtol=1e-10, atol=1e-10)
    biased: Any = model.Vision("dcmm", (3, 8), 5, **options, equal=False).double()
    model.load_weights(biased, state)
    biased.mean.fill_(0.25)
    assert float((biased(images)[0] - wanted).detach().abs().max()) > 1e-6
    biased.attention[0][1].score_bias.scale.data.zero_()
    torch.testing.assert_close(biased(images)[0], wanted, rtol=1e-10, atol=1e-10)


def test_weights_fit_other_images_and_classes() -> None:
    state = make_state()
    made = model.Vision("full", (3, 16), 2, patch=4, channels=128, layers=2, heads=2, ffn=256)
    head = made.head.weight.clone()
    model.load_weights(made, {**state, "pos_embed": state["pos_embed"][:, :1].expand(-1, 5, -1)})
    place = made.encoder.position.weight
    torch.testing.assert_close(place[1:], state["pos_embed"][0, :1].expand(16, -1))
    assert torch.equal(made.head.weight, head)


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_weights_are_read_from_files(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state, path = make_state(), tmp_path / name
    if path.suffix == ".pth":
        torch.save({"model": state}, path)
    else:
        save_file(state, path)
    assert same(model.read_weights(str(path)), state)


def test_weights_that_cannot_be_had_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ValueError, match=r"Expected 'weights' to be a file, or 'timm' to be installed \(got 'vit_tiny'"
    ):
        model.read_weights("vit_tiny")
    (tmp_path / "w.pth").write_text("no weights")
    with pytest.raises(ValueError, match="Expected 'weights' to be a file of weights"):
        model.read_weights(str(tmp_path / "w.pth"))
    state = make_state()
    with pytest.raises(ValueError, match="got 'pos_embed' of another"):
        model.sizes_of({name: x for name, x in state.items() if name != "pos_embed"})
    made = model.Vision("full", (3, 8), 2, patch=4, channels=128, layers=2, heads=2, ffn=256)
    with pytest.raises(ValueError, match=r"got no 'blocks\.1\.attn\.qkv\.bias'"):
        model.load_weights(made, {name: x for name, x in state.items() if name != "blocks.1.attn.qkv.bias"})
    with pytest.raises(ValueError, match=r"got 'blocks\.0\.ls1\.gamma' too"):
        model.load_weights(made, {**state, "blocks.0.ls1.gamma": torch.ones(128)})
    with pytest.raises(ValueError, match=r"Expected 'weights' that fit \(got size mismatch for token\.weight"):
        model.load_weights(made, make_state(colors=1))


def test_a_stand_in_for_timm_is_asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timm:
        @staticmethod
        def create_model(name: str, pretrained: bool) -> torch.nn.Module:
            assert (name, pretrained) == ("vit_tiny", True)
            return torch.nn.Linear(2, 1)

    monkeypatch.setitem(sys.modules, "timm", Timm)
    assert [*model.read_weights("vit_tiny")] == ["weight", "bias"]


# ---------------------------------------------------------------- training


def test_degrees_of_zero_are_counted(small: data.Images) -> None:
    made = train.make_model(dataclasses.replace(RUN, method=METHODS[1], bias="all"), small)
    biases = [layer.score_bias for _, layer in made.attention if isinstance(layer.score_bias, DCMMBias)]
    assert len(biases) == len(made.attention)
    with torch.no_grad():
        for bias in biases:
            bias.lin_degree.weight.zero_()
            bias.lin_degree.bias.fill_(1.0)
    assert train.idle(made, small.test) == 0
    with torch.no_grad():
        biases[0].lin_degree.bias.fill_(-1.0)
    assert train.idle(made, small.test) == pytest.approx(1 / len(biases))
    assert math.isnan(train.idle(train.make_model(dataclasses.replace(RUN, method="full"), small), small.test))


def test_the_best_of_validation_is_tested_once(
    small: data.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy, tests, weights = iter([0.3, 0.5, 0.5]), [], []

    def evaluate(made: model.Vision, images: Tensor, labels: Tensor) -> tuple[float, float]:
        if images is small.test:
            tests.append(made.head.weight.detach().clone())
            return 0.9, 1.0
        weights.append(made.head.weight.detach().clone())
        return next(accuracy), 1.0

    monkeypatch.setattr(train, "evaluate", evaluate)
    rows = train.train(RUN, small, tmp_path)
    assert len(tests) == 1
    assert torch.equal(tests[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert [row["test"] == 0.9 for row in rows] == [False, True, False]


def test_evaluation_is_at_the_final_density(
    small: data.Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    densities = []
    evaluate = train.evaluate

    def look(made: Any, *rest: Any) -> tuple[float, float]:
        densities.append(made.attention[0][1].source.target_density)
        return evaluate(made, *rest)

    monkeypatch.setattr(train, "evaluate", look)
    run = dataclasses.replace(RUN, method=f"sbm:{FEW},density=0.3")
    train.train(run, small, tmp_path)
    assert densities == [0.3] * 4
    assert torch.load(tmp_path / run.file)["sparsifier"]["steps"] == 6


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [train.cosine(at / 100) for at in range(101)]
    assert rates[0] == 0
    assert rates[4] == pytest.approx(1)
    assert rates[52] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0)
    assert max(rates) <= 1


@pytest.mark.slow
def test_the_program_trains_reports_and_draws(
    small: data.Images, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--steps", "4", "--channels", "8", "--layers", "2", "--heads", "2", "--validation", "0.2", "--batch-size", "8",
    ]  # fmt: skip
    words += ["--output", str(tmp_path), "--methods", "full", *METHODS[1:3]]
    program.main(words)
    said = capsys.readouterr().out
    assert "full, seed 0: " in said
    assert f"| dcmm:{FEW} | 1 |" in said
    rows = read(tmp_path / "rows.csv")
    assert len([row for row in rows if row["test"] == row["test"]]) == 3
    saved = (tmp_path / "rows.csv").read_text()
    program.main([*words, "--seeds", "0", "1"])
    assert (tmp_path / "rows.csv").read_text().startswith(saved)
    assert re.search(r"\| full \| 2 \| [\d,]+ \| \d+\.\d\d ± \d+\.\d\d \|", capsys.readouterr().out)
    assert (tmp_path / "digits.png").stat().st_size > 5000
    program.main([*words, "--pictures", "7", "--images", "1"])
    for method in METHODS[1:3]:
        run = dataclasses.replace(RUN, method=method, seed=0)
        (path,) = tmp_path.glob(f"7-{Path(run.file).stem}-*.png")
        assert np.asarray(Image.open(path)).std() > 10
    with pytest.raises(SystemExit):
        program.main([*words, "--steps", "5"])
    assert "Expected 'steps of digits' to be 4 as in" in capsys.readouterr().err


def test_pictures_show_what_the_layer_does() -> None:
    torch.manual_seed(0)
    made: Any = model.Vision("dcmm", (1, 8), 3, **{**SIZES, "ffn": 900}, everywhere=True).eval()
    image = torch.randint(256, (1, 8, 8), generator=generator(), dtype=torch.uint8)
    guess, layers = pictures.look_at(made, image)
    assert guess == int(made(image[None])[0].argmax())
    assert [number for number, _ in layers] == [0, 1]
    tokens, _ = made.tokens(image[None])
    block = made.encoder.layers[0]
    x = block.norm1(made.encoder.token(tokens) + made.encoder.position.weight)
    query, key = (
        lin(x).unflatten(1, (2, -1)).transpose(0, 1) for lin in (block.attention.lin_query, block.attention.lin_key)
    )
    seen, score = layers[0][1], query[:, 0, None] @ key.mT / 4**0.5
    torch.testing.assert_close(seen.plain, score[:, 0].softmax(-1))
    bias = block.attention.score_bias(query, key, patterns.full(5, heads=2)).view(2, 5, 5)
    assert seen.biased is not None
    torch.testing.assert_close(seen.biased, (score[:, 0] + bias[:, 0]).softmax(-1))
    assert seen.degree.shape == (2, 5)
    torch.testing.assert_close(seen.membership.sum(-1), torch.ones(2, 5))


def test_the_row_of_the_class_token() -> None:
    graph = AttentionGraph.from_dense(
        torch.tensor([[[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[0, 1, 0], [1, 1, 1], [0, 0, 1]]])
    )
    row = pictures.class_row(graph, torch.arange(1.0, graph.num_edges + 1))
    assert row.tolist() == [[1, 0, 2], [0, 7, 0]]


@pytest.mark.slow
def test_digits_are_learnt(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, patch=2, channels=64, heads=4, ffn=128, steps=120, batch_size=64)
    best = max(row["validation"] for row in train.train(run, data.load("digits"), tmp_path))
    assert best > 0.8


def test_folders_that_do_not_do_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "few", ("",), count=2)
    with pytest.raises(ValueError, match="Expected 'data' with at least 3 images of each class"):
        data.load(str(tmp_path / "few"))
    make_folder(tmp_path / "more", ("train", "test"))
    chunk = b"IHDR" + bytes(5)  # Pillow raises a ValueError of its own
    short = b"\x89PNG\r\n\x1a\n" + (5).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    for content in (b"no image", short):
        (tmp_path / "more" / "train" / "cat" / "bad.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"^Expected .*bad\.png to be an image"):
            data.load(str(tmp_path / "more"))
    (tmp_path / "more" / "test" / "dog").rename(tmp_path / "more" / "test" / "fox")
    with pytest.raises(ValueError, match=r"\(got \['fox'\] in test alone\)"):
        data.load(str(tmp_path / "more"))
