"""Graph layers with edge features, ours and PyG's: time and memory of a forward and backward pass.

    python -m examples.benchmarks.edge_features                          all suites, a quarter of an hour
    python -m examples.benchmarks.edge_features --suites layer --edges 64000 --compiled

"layer" is a TransformerConv of 4 heads of 32 channels and 16 edge features, over random graphs with 16 edges a node. "molecules" is the same
layer over 128 molecules of 26 atoms and 55 edges. "model" is a training step with Adam of five GPS layers of 64 channels over such molecules,
with message passing by a TransformerConv and attention within each molecule. First, both layers must have the same outputs and gradients. Arms
take turns in one process; the median of the rounds counts. Memory is what the largest tensor of a pass takes, in MiB. OMP_NUM_THREADS sets the threads.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GPSConv, TransformerConv

import sbm_pyg
from examples.common.command import Command
from examples.common.tables import Row, by, markdown, write_csv
from sbm_pyg.progress import tqdm

HEADS, CHANNELS, FEATURES = 4, 32, 16
SUITES = ("layer", "molecules", "model")
Call = Callable[[], Any]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.benchmarks.edge_features", __doc__)
    command.add_argument(
        "--suites", nargs="+", choices=SUITES, default=[*SUITES], help="what to measure (default: all)"
    )
    command.add_argument(
        "--edges", nargs="+", type=int, default=[1000, 16_000, 64_000, 100_000], help="of the suite layer"
    )
    command.add_argument(
        "--compiled", action="store_true", help="PyG's layer by torch.compile too, which needs a compiler"
    )
    command.option("rounds", 15, "turns of each arm", least=1)
    command.option("csv", Path("edge_features.csv"), "where to write")
    return command.read(arguments)


def molecules(count: int = 128, atoms: int = 26) -> tuple[Tensor, Tensor]:
    """Edges of molecules in both directions, and the molecule of each atom: chains with two or three rings."""
    random, number = torch.Generator().manual_seed(0), torch.arange(count * atoms)
    chain = torch.stack([number[:-1], number[1:]])[:, number[1:] % atoms != 0]
    first = torch.randint(atoms - 5, (count, 3), generator=random) + atoms * torch.arange(count)[:, None]
    rings = torch.stack([first.flatten(), first.flatten() + 5])[:, torch.arange(3 * count) % 6 != 0]
    bonds = torch.cat([chain, rings], dim=1)
    return torch.cat([bonds, bonds.flip(0)], dim=1), number // atoms


class Model(nn.Module):
    """Five layers of a graph transformer, and one number for each molecule."""

    def __init__(self, channels: int = 64, layers: int = 5) -> None:
        super().__init__()
        convs = [TransformerConv(channels, channels // HEADS, HEADS, edge_dim=FEATURES) for _ in range(layers)]
        self.layers = nn.ModuleList(GPSConv(channels, conv, HEADS, attn_type="multihead") for conv in convs)
        self.head = nn.Linear(channels, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index, batch, edge_attr=edge_attr)
        return self.head(x).new_zeros(int(batch[-1]) + 1, 1).index_add(0, batch, self.head(x))


def arms_of(suite: str, edges: int, compiled: bool) -> dict[str, Call]:
    """One forward and backward pass of each arm; a training step of the suite "model"."""
    torch.manual_seed(0)
    edge_index, batch = molecules()
    if suite == "layer":
        edge_index = torch.randint(max(edges // 16, 1), (2, edges))
    nodes = int(edge_index.max()) + 1
    width = 64 if suite == "model" else HEADS * CHANNELS
    x = torch.randn(nodes, width, requires_grad=suite != "model")
    edge_attr = torch.randn(edge_index.size(1), FEATURES, requires_grad=suite != "model")
    modules: dict[str, nn.Module] = {
        "PyG": Model() if suite == "model" else TransformerConv(width, CHANNELS, HEADS, edge_dim=FEATURES)
    }
    if suite == "model":
        modules["sbm_pyg"] = Model()
        modules["sbm_pyg"].load_state_dict(modules["PyG"].state_dict())
        sbm_pyg.replace_attention(modules["sbm_pyg"], source="full")
    else:
        conv = modules["PyG"]
        assert isinstance(conv, TransformerConv)
        modules |= {"sbm_pyg": sbm_pyg.TransformerConv.from_pyg(conv)}
    if compiled:
        modules["PyG, compiled"] = cast(nn.Module, torch.compile(modules["PyG"]))

    def step(module: nn.Module) -> Call:
        inputs = (x, edge_index, edge_attr, batch) if suite == "model" else (x, edge_index, edge_attr)
        optimizer = torch.optim.Adam(module.parameters()) if suite == "model" else None

        def call() -> None:
            module.zero_grad()
            module(*inputs).square().mean().backward()
            if optimizer is not None:
                optimizer.step()

        return call

    return {name: step(module) for name, module in modules.items()}


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest result of any operation."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.bytes = max(self.bytes, x.numel() * x.element_size() if isinstance(x, Tensor) else 0)
        return out


def gate() -> None:
    """Refuses to go on unless both layers agree."""
    torch.manual_seed(0)
    conv = TransformerConv(16, 8, HEADS, edge_dim=5).double()
    x, edge_attr = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((40, 16), (300, 5)))
    edge_index, results = torch.randint(40, (2, 300)), []
    for module in (conv, sbm_pyg.TransformerConv.from_pyg(conv)):
        out = module(x, edge_index, edge_attr)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, edge_attr, *module.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def measure(suite: str, edges: int, rounds: int, compiled: bool) -> list[Row]:
    """A row for each arm: the median of its seconds, and the size of its largest tensor."""
    arms = arms_of(suite, edges, compiled)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    largest = {}
    for name, call in arms.items():
        call()
        with Largest() as mode:
            largest[name] = float("nan") if "compiled" in name else (call(), mode.bytes / 2**20)[1]
    for _ in range(rounds):
        for name, call in arms.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    shown = f"{suite}, {edges:,} edges" if suite == "layer" else suite
    return [
        {"suite": shown, "arm": name, "seconds": statistics.median(seconds[name]), "MiB": largest[name]}
        for name in arms
    ]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    gate()
    cases = [(suite, edges) for suite in args.suites for edges in (args.edges if suite == "layer" else [0])]
    rows: list[Row] = []
    for suite, edges in tqdm(cases, unit="case"):
        rows += measure(suite, edges, args.rounds, args.compiled)
        write_csv(args.csv, rows)
    lines = []
    for suite, arms in by(rows, "suite").items():
        ours = next(row for row in arms if row["arm"] == "sbm_pyg")
        for row in arms:
            ratio = f"{row['seconds'] / ours['seconds']:.2f}"
            lines.append([suite, row["arm"], f"{1e3 * row['seconds']:.3g}", f"{row['MiB']:.3g}", ratio])
    print(f"{torch.get_num_threads()} threads")
    print(markdown(["suite", "arm", "ms", "largest tensor, MiB", "times sbm_pyg"], lines))


if __name__ == "__main__":
    main()
