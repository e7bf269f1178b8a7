"""Puts sampled attention into a Hugging Face encoder, through the library's attention interface. Needs `pip install transformers`.

python examples/hugging_face.py
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
from typing import Any


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of 32 sequences (default: 60)")
    parser.add_argument("--num-blocks", type=int, default=8, help="blocks of each head's model (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and graphs (default: 0)")
    return parser.parse_args(arguments)


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertForSequenceClassification, PreTrainedModel

from sbm_pyg import SBMAttentionConv, patterns


def attach(model: PreTrainedModel, num_blocks: int | None, **options: Any) -> int:
    """Give each self-attention of a model a layer that chooses its graph, and select the interface; returns how many there were.

    The projections stay where they are: the layer's own are taken out, and :meth:`SBMAttentionConv.attend` starts after them. Attach
    before an optimizer is made or a checkpoint of an attached model is loaded, for the layer has parameters.
    """
    config, count = model.config, 0
    heads = config.num_attention_heads
    for module in [*model.modules()]:
        if hasattr(module, "scaling") and hasattr(module, "is_causal"):
            layer = SBMAttentionConv(
                config.hidden_size, config.hidden_size // heads, heads, num_blocks, dropout=config.attention_probs_dropout_prob, **options
            )
            layer.lin_query = layer.lin_key = layer.lin_value = None
            module.sbm_attention = layer.to(model.device, model.dtype).train(module.training)
            count += 1
    if count == 0:
        raise ValueError(f"Expected a model whose attention goes through the interface (got {type(model).__name__}). See its source.")
    model.set_attn_implementation("sbm")
    return count


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the library calls: tensors are `[B, H, L, C]`, the mask is what :func:`padding` made of it; returns `[B, L, H, C]`."""
    layer = module.sbm_attention
    if not isinstance(layer, SBMAttentionConv) or key.size(2) != query.size(2) or module.is_causal:
        raise ValueError("Expected the self-attention of an encoder with a layer attached (got another). Call `attach(model)` first.")
    if scaling is not None and abs(scaling - layer.scale) > 1e-6:
        raise ValueError(f"Expected scores to be scaled by {layer.scale} (got {scaling}). Set `layer.scale` to it.")
    batch, _heads, length, _channels = query.shape
    real = query.new_ones(batch, length, dtype=torch.bool) if attention_mask is None else attention_mask
    query, key, value = (x.transpose(1, 2)[real].transpose(0, 1) for x in (query, key, value))  # [H, N, C]
    ptr = nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
    graph = patterns.full(None, ptr=ptr) if layer.num_blocks is None else None
    out = layer.attend(query, key, value, graph, ptr=ptr)
    padded = out.new_zeros(batch, length, out.size(1))
    padded[real] = out
    return padded.unflatten(2, (layer.heads, -1)), None


def padding(batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """The mask of real tokens as it is, `[B, L]`. Without a function of its own, an attention gets no mask from the library."""
    return attention_mask


AttentionInterface.register("sbm", attention)
AttentionMaskInterface.register("sbm", padding)


def small_bert() -> BertForSequenceClassification:
    """A randomly initialised model of two layers and two classes."""
    config = BertConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    return BertForSequenceClassification(config)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(options.seed)
    tokens = torch.randint(1, 16, (32, 24))
    mask = (torch.arange(24) < torch.randint(12, 25, (32, 1))).long()
    labels = torch.randint(2, (32,))
    tokens[:, 0] = labels  # the first token tells
    model = small_bert().eval()
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).logits
        attached = attach(model, num_blocks=None)
        difference = (model(tokens, attention_mask=mask).logits - before).abs().max()
    print(f"attached {attached} layers; over the full graph, logits differ by {difference:.1e} at most")

    model = small_bert().train()
    attach(model, num_blocks=options.num_blocks)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        loss = model(tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    print(f"after {options.steps} steps over sampled graphs: loss {losses[-1]:.3f} (at first: {losses[0]:.3f})")


if __name__ == "__main__":
    main()
