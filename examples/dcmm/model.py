"""Vision transformers that differ in their last attention, or in all: plain, biased, or over a sampled graph; and weights of ``timm`` in them.

Blocks are pre-norm, as those of ``timm``: LayerNorm with an epsilon of 1e-6, GELU, queries, keys and values with bias. The class token is a
token without pixels in front of the patches, and its position is learned as theirs are.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from examples.common import attention
from examples.common.command import read_method, require
from sbm_pyg import AttentionConv, SequenceEncoder

METHODS = ("full", "dcmm", "sbm", "dcsbm", "dcmm-sbm")
BIAS: dict[str, Any] = {
    "degree": "relu", "squash": 1, "symmetric": 0, "tied": 1, "num_clusters": 32, "entropy_weight": 0.1,
}  # fmt: skip
GRAPH = {
    "estimator": "local", "probes": 16.0, "num_clusters": 32, "parameterization": "overlapping", "cluster_init": "orthogonal",
    "density": 0.25,  # target density; 0: probabilities as they are
    "control": "sparsifier",  # dense first; "fixed": sparse from the start
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"dcmm": BIAS, "sbm": GRAPH, "dcsbm": GRAPH, "dcmm-sbm": BIAS | GRAPH}
OWN = (".source.", ".score_bias.")  # in names of parameters that plain attention has not
RENAMED = {"norm1": "norm1", "norm2": "norm2", "attn.proj": "lin_out", "mlp.fc1": "ffn.0", "mlp.fc2": "ffn.3"}
NAMES = ("attention.lin_query", "attention.lin_key", "attention.lin_value")  # which timm has in one


def make_vision_attention(method: str, channels: int, width: int, heads: int) -> nn.Module:
    """The attention of a method, and its options."""
    kind, options = read_method(method, METHODS, OPTIONS)
    values = {"target_density" if name == "density" else name: options[name] for name in options if name != "control"}
    values |= {"degree_corrected": 1} if kind == "dcsbm" else {}
    return attention.make_attention(kind.replace("dcsbm", "sbm"), channels, width, heads, values)


class Vision(nn.Module):
    """A vision transformer whose last block has a method such as "sbm:estimator=mask", or all blocks if ``everywhere``.

    ``shape`` is channels and side of the images. If ``equal``, it has as many parameters as full attention, by a narrower feed-forward network.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, method: str, shape: tuple[int, int], num_classes: int, *, patch: int, channels: int, layers: int, heads: int,
        ffn: int, everywhere: bool = False, equal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        words = f"'patch' to divide the side of the images, {shape[1]}"
        require(shape[1] % patch == 0, words, patch, "Resize them with --size.")

        def encoder(ffn: int) -> SequenceEncoder:
            number = itertools.count(1)

            def attention(channels: int, width: int, heads: int) -> nn.Module:
                is_chosen = next(number) == layers or everywhere
                return make_vision_attention(method if is_chosen else "full", channels, width, heads)

            return SequenceEncoder(
                None, channels, in_channels=shape[0] * patch**2, num_layers=layers, heads=heads, ffn_channels=ffn,
                max_length=1 + self.side**2, dropout=0.0, attention=attention,
            )  # fmt: skip

        self.patch, self.side = patch, shape[1] // patch
        self.encoder = encoder(ffn)
        extra = sum(x.numel() for name, x in self.encoder.named_parameters() if any(part in name for part in OWN))
        if equal and extra:
            narrow = ffn - round(extra / (layers * (2 * channels + 1)))
            words = f"'ffn' above {ffn - narrow}, as the method has {extra:,} parameters of its own"
            require(narrow >= 1, words, ffn, "Raise it, or take fewer blocks.")
            self.encoder = encoder(narrow)
        for module in self.encoder.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6
        self.head = nn.Linear(channels, num_classes)
        self.register_buffer("mean", torch.zeros(shape[0], 1, 1))
        self.register_buffer("deviation", torch.ones(shape[0], 1, 1))

    @property
    def attention(self) -> list[tuple[int, AttentionConv]]:
        """Number and attention of each block that has a graph or a bias."""
        layers = ((number, block.attention) for number, block in enumerate(self.encoder.layers))
        return [(number, layer) for number, layer in layers if isinstance(layer, AttentionConv)]

    def count(self) -> int:
        return sum(x.numel() for x in self.parameters())

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels of the class token, which has none, and of each patch, ``[B * L, C]``; and offsets ``[B+1]``."""
        x = (images.to(self.mean.dtype) / 255 - self.mean) / self.deviation
        x = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # [B, C, rows, p, columns, p]
        x = pad(x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), (0, 0, 1, 0))
        return x.flatten(0, 1), x.size(1) * torch.arange(len(x) + 1, device=x.device)

    def forward(self, images: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Logits of images ``[B, channels, side, side]`` uint8, and the mean density of the graphs of its method."""
        x, ptr = self.tokens(images)
        x, trace = self.encoder(x, ptr, seed=seed, return_trace=True)
        density = [trace.density[number] for number, _ in self.attention]
        return self.head(x[ptr[:-1]]), torch.stack(density or [trace.density[-1]]).mean()


def read_weights(weights: str) -> dict[str, Tensor]:
    """The state of a vision transformer of ``timm``, by name or from a file of ``torch.save`` or safetensors."""
    path = Path(weights)
    try:
        if path.suffix == ".safetensors" and path.is_file():
            from safetensors.torch import load_file

            return load_file(path)
        if path.is_file():
            state = torch.load(path, map_location="cpu", weights_only=True)
            return dict(state.get("model", state.get("state_dict", state)))
        import timm

        return dict(timm.create_model(weights, pretrained=True).state_dict())
    except ImportError:
        words = f"Expected 'weights' to be a file, or 'timm' to be installed (got {weights!r}, which is no file, and no timm)."
        way_out = "Install it with `pip install timm`, or save `model.state_dict()` where it is."
        raise ValueError(f"{words} {way_out}") from None
    except Exception as error:  # a damaged file can fail in any way
        what = "a file of weights" if path.is_file() else "a file or a model of timm"
        raise ValueError(f"Expected 'weights' to be {what} (got {weights!r}: {error}). Copy it again.") from None


def sizes_of(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Patch, channels, layers, heads of 64 channels, width of the feed-forward network and side of the images that weights are made for."""
    try:
        channels, _, patch, _ = state["patch_embed.proj.weight"].shape
        layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
        sizes = {"patch": patch, "channels": channels, "layers": layers, "heads": max(1, channels // 64)}
        side = patch * math.isqrt(state["pos_embed"].size(1) - 1)
        return sizes | {"ffn": len(state["blocks.0.mlp.fc1.weight"]), "size": side}
    except (KeyError, ValueError) as error:
        text = f"Expected 'weights' of a plain ViT of timm (got {error} of another). Take such one."
        raise ValueError(text) from None


def load_weights(model: Vision, state: Mapping[str, Tensor]) -> None:
    """Takes over weights of ``timm``: all but those of the method, and of the head if classes differ; positions are interpolated."""
    left, weights = dict(state), {}
    try:
        for part in ("weight", "bias"):
            weights[f"norm.{part}"] = left.pop(f"norm.{part}")
            for number in range(len(model.encoder.layers)):
                block, layer = f"blocks.{number}.", f"layers.{number}."
                for timm_name, name in RENAMED.items():
                    weights[f"{layer}{name}.{part}"] = left.pop(f"{block}{timm_name}.{part}")
                thirds = left.pop(f"{block}attn.qkv.{part}").chunk(3)
                weights |= {f"{layer}{name}.{part}": third for name, third in zip(NAMES, thirds, strict=True)}
        weights["token.weight"] = left.pop("patch_embed.proj.weight").flatten(1)
        weights["token.bias"] = left.pop("patch_embed.proj.bias")
        token, places = left.pop("cls_token")[0], left.pop("pos_embed")[0]
    except KeyError as error:
        raise ValueError(f"Expected 'weights' of a plain ViT of timm (got no {error}). Take another model.") from None
    first = token + places[:1] - weights["token.bias"]  # to which the bias is added where there are no pixels
    grid = places[1:].T.unflatten(1, (math.isqrt(len(places) - 1), -1))[None]
    if grid.size(2) != model.side:
        grid = interpolate(grid, (model.side, model.side), mode="bicubic", antialias=True)
    weights["position.weight"] = torch.cat([first, grid[0].flatten(1).T])
    head = {part: left.pop(f"head.{part}", torch.empty(0)) for part in ("weight", "bias")}
    if left:
        raise ValueError(f"Expected 'weights' of a plain ViT of timm (got {min(left)!r} too). Take another model.")
    try:
        model.encoder.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        got = str(error).splitlines()[-1].strip()
        text = f"Expected 'weights' that fit (got {got}). Leave sizes to them, and take their colors."
        raise ValueError(text) from None
    if head["weight"].shape == model.head.weight.shape:
        model.head.load_state_dict(head)
