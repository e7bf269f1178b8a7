"""What block models see in images of a class: memberships, degrees, and attention of the class token.

Each row of a picture is a head. From the left: the image; the block to which each patch belongs most; its memberships in the strongest
blocks; its degree; what the class token attends to; and how queries' blocks (rows) attract keys' blocks (columns). Degrees are those of the
bias, or else those by which the sampled graph is corrected, or else the expected number of keys.
"""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from examples.common.pictures import save_figure
from examples.dcmm.data import Images
from examples.dcmm.model import Vision
from examples.dcmm.train import Run, load_best, make_model
from sbm_pyg import SBM, AttentionConv, AttentionGraph, DCMMBias

BLOCKS = 3  # whose memberships are drawn


@dataclasses.dataclass(frozen=True)
class Look:
    """What a layer does in the sequence of one image, ``L`` tokens of which the class token is the first."""

    membership: Tensor  # [H, L, K], of queries
    degree: Tensor  # [H, L]: of the bias, or of the graph, or expected number of keys
    block_matrix: Tensor  # [H, K, K]
    plain: Tensor  # [H, L], what the class token attends to without the bias
    biased: Tensor | None  # [H, L], and with it, if there is one


def class_row(graph: AttentionGraph, weights: Tensor) -> Tensor:
    """Attention weights ``[E]`` of the first query to each key, ``[H, L]``."""
    is_class_token = graph.edge_row % graph.num_queries == 0
    out = weights.new_zeros(graph.heads, graph.num_keys)
    return out.index_put((graph.edge_head[is_class_token], graph.col[is_class_token].long()), weights[is_class_token])


@torch.no_grad()
def look(layer: AttentionConv, x: Tensor) -> Look:
    """Looks at a layer that attends over the tokens of one image, ``[L, C]``."""
    query, key = (lin(x).unflatten(1, (layer.heads, -1)).transpose(0, 1) for lin in (layer.lin_query, layer.lin_key))
    _, choice = layer(x, seed=0, return_choice=True)
    graph, bias, sbm = choice.graph, layer.score_bias, choice.probability

    def attended() -> Tensor:
        return class_row(graph, layer(x, graph, return_attention_weights=True)[1][1])

    if not isinstance(bias, DCMMBias):
        if not isinstance(sbm, SBM):
            raise ValueError("Expected 'methods' with a block model (got one without). See --help.")
        head: Any = getattr(layer.source, "head", None)
        corrected = head is not None and head.degree_corrected
        degree = head.degrees(query, key)[0] if corrected else sbm.expected_degree()
        return Look(sbm.query_membership, degree, sbm.block_matrix, attended(), None)
    with_bias, seen = attended(), bias.predict(query, key)
    layer.score_bias = None
    try:
        plain = attended()
    finally:
        layer.score_bias = bias
    return Look(seen.query_membership, seen.query_degree, seen.block_matrix, plain, with_bias)


@torch.no_grad()
def look_at(model: Vision, image: Tensor) -> tuple[int, list[tuple[int, Look]]]:
    """What a model says of an image ``[channels, side, side]``, and what its layers do in it, by their number."""
    tokens: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        return lambda _, inputs: tokens.update({number: inputs[0]})

    with ExitStack() as after:
        for number, layer in model.attention:
            after.callback(layer.register_forward_pre_hook(keep(number)).remove)
        guess = int(model(image[None])[0].argmax())
    return guess, [(number, look(layer, tokens[number])) for number, layer in model.attention]


def draw(image: Tensor, seen: Look, side: int, name: str) -> Figure:
    """A row for each head; the class token is in no map."""
    pixels = image.permute(1, 2, 0) if len(image) == 3 else image[0]
    shown = min(BLOCKS, seen.membership.size(2))
    heads, panels = len(seen.membership), 5 + shown + (seen.biased is not None)
    figure = Figure(figsize=(1.9 * panels, 1.95 * heads + 0.9), layout="constrained")
    for head, line in enumerate(figure.subplots(heads, panels, squeeze=False)):
        member = seen.membership[head, 1:]
        used, among = member.argmax(1).unique(return_inverse=True)
        strongest = member.mean(0).topk(shown).indices.tolist()
        degree = seen.degree[head, 1:]
        # those of the bias may all be 0; expected numbers of keys are much alike
        lowest = {"vmin": 0, "vmax": float(degree.max()) or 1.0} if seen.biased is not None else {}
        maps: list[tuple[str, Tensor, dict[str, Any]]] = [
            (f"{len(used)} dominant blocks", among, {"cmap": "tab20", "vmin": 0, "vmax": 19}),
            *((f"in block {at}", member[:, at], {"vmin": 0}) for at in strongest),
            (f"degree; of class {float(seen.degree[head, 0]):.2g}", degree, {"cmap": "magma", **lowest}),
        ]
        attended = [row[head, 1:] for row in (seen.plain, seen.biased) if row is not None]
        same: dict[str, Any] = {"cmap": "magma", "vmin": 0, "vmax": max(float(row.max()) for row in attended)}
        names = ("class token, no bias", "class token, bias") if seen.biased is not None else ("class token",)
        maps += [(title_, row, same) for title_, row in zip(names, attended, strict=True)]
        squares = [(title_, values.view(side, side), options) for title_, values, options in maps]
        line[0].imshow(pixels.numpy(), cmap="gray")
        line[0].set_ylabel(f"head {head}", fontsize="small")
        squares.append(("block matrix", seen.block_matrix[head], {}))
        for axes, (title_, values, options) in zip(line[1:], squares, strict=True):
            drawn = axes.imshow(values.numpy(), **options)
            axes.set_title(title_, fontsize=7)
            if values is not squares[0][1]:  # numbers of blocks mean nothing
                figure.colorbar(drawn, ax=axes, shrink=0.7).ax.tick_params(labelsize=5)
        for axes in line:
            axes.set(xticks=[], yticks=[])
    figure.suptitle(name, fontsize=9)
    return figure


def draw_all(runs: list[Run], data: Images, name: str, count: int, folder: Path) -> list[Path]:
    """A picture of each block that has a block model, for each run and image."""
    if name not in data.classes:
        names = ", ".join(data.classes[:20])
        raise ValueError(f"Expected 'pictures' to be a class of the images, among {names} (got {name!r}).")
    paths = []
    for run in (run for run in runs if run.method != "full"):
        model = make_model(run, data)
        load_best(run, model, folder)
        for number in (data.test_labels == data.classes.index(name)).nonzero()[:count, 0].tolist():
            guess, layers = look_at(model, data.test[number])
            for layer, seen in layers:
                about = f"{run.name}, block {layer}: image {number} of the test, {name}, said {data.classes[guess]}"
                paths.append(folder / f"{name}-{Path(run.file).stem}-{number}-block{layer}.png")
                save_figure(paths[-1], draw(data.test[number], seen, model.side, about), dpi=110)
    if not paths:
        raise ValueError("Expected 'methods' with a block model for 'pictures' (got full alone). See --help.")
    return paths
