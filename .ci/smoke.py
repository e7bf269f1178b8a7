"""What an installed sbm_pyg must do where its dependencies are and nothing else; run it outside the checkout."""

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch_geometric  # noqa: F401

start = time.process_time()
import sbm_pyg  # noqa: E402

seconds = time.process_time() - start
print(
    f"sbm_pyg {sbm_pyg.__version__} from {sbm_pyg.__file__}: "
    f"imported in {seconds:.2f} s beyond torch and torch-geometric"
)
assert seconds < 2, seconds
root = Path(sbm_pyg.__file__).parent
assert "site-packages" in root.parts, root
assert (root / "py.typed").is_file()
optional = (
    "lightning",
    "torchmetrics",
    "matplotlib",
    "scipy",
    "sklearn",
    "ortools",
    "entmax",
    "torch_sparse",
    "sphinx",
    "pytest",
)
there = [name for name in optional if importlib.util.find_spec(name)]
assert not there, f"{there} are installed, so this is no empty environment"

from sbm_pyg import AttentionGraph, SBMAttentionConv, SequenceClassifier, SequenceEncoder, analysis, patterns  # noqa: E402

x, ptr = torch.randn(300, 64), torch.tensor([0, 100, 300])
conv = SBMAttentionConv(64, 32, heads=2, num_clusters=16)
out, graph = conv(x, ptr=ptr, return_graph=True)
out.sum().backward()
assert out.shape == (300, 64)
assert conv.source.head.clusters.grad is not None
assert conv(x, patterns.window(None, 3, ptr=ptr)).shape == (300, 64)
assert AttentionGraph.from_edge_index(graph.head(0).edge_index, 300, query_ptr=ptr, key_ptr=ptr) == graph.head(0)
assert graph.to_networkx(1, 0).number_of_nodes() == 200
try:
    analysis.universality(patterns.full(10))
except ImportError as error:
    assert "pip install sbm_pyg[analysis]" in str(error), error  # noqa: PT017
else:
    raise AssertionError("scipy is not there, and nothing says so")

model = SequenceClassifier(SequenceEncoder(15, 16, attention_options={"num_clusters": 4}), 10).eval()
tokens = torch.randint(0, 15, (30,))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(Path(folder) / "model", model_card_kwargs={"task": "smoke", "results": {"accuracy": 0.1}})
    again = SequenceClassifier.from_pretrained(Path(folder) / "model")
assert torch.equal(model(tokens, seed=1), again(tokens, seed=1))
subprocess.run([sys.executable, "-W", "ignore", "-m", "sbm_pyg.info"], check=True)
print("smoke test passed")
