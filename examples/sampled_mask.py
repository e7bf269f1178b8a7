"""Draws a sampled mask next to its expectation: the figure of the README. Expect 16,592 edges with the seed 0.

python examples/sampled_mask.py --out docs/figures/sampled_mask.png
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=256, help="tokens of the sequence (default: %(default)s)")
parser.add_argument("--blocks", type=int, default=5, help="blocks of the model (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="seed of the sampled mask (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("sampled_mask.png"), help="figure (default: %(default)s)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch

from sbm_pyg import SBM, sample_edges


def smooth_blocks(tokens: int, blocks: int) -> SBM:
    """A model made by hand: memberships drift along the sequence, each block attends to itself, the next one and the first."""
    place = torch.arange(tokens) / tokens * blocks
    distance = (place[:, None] - torch.arange(blocks) - 0.5).abs()
    membership = (1.3 - 1.3 * distance).clamp(0, 0.9)[None]
    block = 0.8 * torch.eye(blocks) + 0.15 * torch.diag(torch.ones(blocks - 1), 1)
    block[:, 0] += 0.1
    return SBM(membership, membership, block[None])


def main(arguments: list[str] | None = None) -> None:
    from matplotlib.figure import Figure

    options = parser.parse_args(arguments)
    if wrong := [name for name in ("tokens", "blocks") if getattr(options, name) < 1]:
        parser.error(f"Expected '{wrong[0]}' to be at least 1 (got {getattr(options, wrong[0])}). See --help.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sbm = smooth_blocks(options.tokens, options.blocks)
    graph = sample_edges(sbm, clamp=True, seed=options.seed)
    figure = Figure(figsize=(9.2, 4.9), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, image in zip(axes, (sbm.edge_prob_dense()[0].clamp(max=1), graph.to_dense()[0]), strict=True):
        shown = axis.imshow(image.numpy(), vmin=0, vmax=1, cmap="magma_r", interpolation="nearest")
        axis.set_xlabel("key (token)")
    axes[0].set_title(f"expectation $Y S Z^T$: {float(sbm.expected_edges()):,.0f} edges")
    axes[1].set_title(f"sampled mask: {graph.num_edges:,} edges, density {100 * float(graph.density):.1f} %")
    axes[0].set_ylabel("query (token)")
    figure.colorbar(shown, ax=axes, label="probability of an edge", shrink=0.9)
    figure.savefig(options.out, dpi=110)
    print(f"{graph}\nwrote {options.out}")


if __name__ == "__main__":
    main()
