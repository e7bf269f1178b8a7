"""Puts sampled attention into a Hugging Face encoder, through the library's attention interface (`pip install transformers`).

    python examples/hugging_face.py

Expect logits that agree to 1e-5 over the full graph, and a loss below 0.05 after 60 steps over sampled ones.
"""

import argparse
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60, help="training steps of 32 sequences (default: 60)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and graphs (default: 0)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch
import transformers
from torch import Tensor, nn

from sbm_pyg import SBMAttentionConv, patterns


def small_bert() -> Any:
    """Two layers and two classes, without dropout."""
    sizes: Any = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def attach(model: Any, num_blocks: int | None) -> int:
    """Give each self-attention a layer that chooses its graph; returns how many. Attach before an optimizer is made."""
    chosen = model.config
    width, heads, dropout = chosen.hidden_size, chosen.num_attention_heads, chosen.attention_probs_dropout_prob
    modules = [each for each in model.modules() if hasattr(each, "scaling") and not getattr(each, "is_causal", True)]
    for module in modules:
        layer = SBMAttentionConv(width, width // heads, heads, num_blocks, dropout=dropout)
        layer.lin_query = layer.lin_key = layer.lin_value = None
        layer.scale = module.scaling
        module.sbm_attention = layer.to(model.device, model.dtype).train(module.training)
    transformers.AttentionInterface.register("sbm", attention)
    transformers.AttentionMaskInterface.register("sbm", padding)
    model.set_attn_implementation("sbm")
    return len(modules)


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Any:
    """What the library calls with `[B, H, L, C]` and the mask of :func:`padding`; returns `[B, L, H, C]` and no weights."""
    layer: Any = module.sbm_attention
    real = query.new_ones(query.size(0), query.size(2), dtype=torch.bool) if mask is None else mask
    ptr = nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
    query, key, value = (x.transpose(1, 2)[real].transpose(0, 1) for x in (query, key, value))  # [H, N, C]
    graph = patterns.full(None, ptr=ptr) if layer.num_blocks is None else None
    padded = query.new_zeros(*real.shape, layer.heads, query.size(2))
    padded[real] = layer.attend(query, key, value, graph, ptr=ptr).unflatten(1, padded.shape[2:])
    return padded, None


def padding(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The mask of real tokens as it is, `[B, L]`: without such a function, an attention gets no mask from the library."""
    return attention_mask


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tokens = torch.randint(1, 16, (32, 24))
    mask = (torch.arange(24) < torch.randint(12, 25, (32, 1))).long()
    labels = tokens[:, 0] = torch.randint(2, (32,))  # the first token tells
    model = small_bert().eval()
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).logits
        attached = attach(model, num_blocks=None)
        difference = (model(tokens, attention_mask=mask).logits - before).abs().max()
    print(f"attached {attached} layers; over the full graph, logits differ by {difference:.1e} at most")

    model = small_bert().train()
    attach(model, num_blocks=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        losses.append(model(tokens, attention_mask=mask, labels=labels).loss)
        losses[-1].backward()
        optimizer.step()
    print(f"after {options.steps} steps over sampled graphs: loss {losses[-1]:.3f} (at first: {losses[0]:.3f})")


if __name__ == "__main__":
    main()
