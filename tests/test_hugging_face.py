"""Models of Hugging Face over the graphs of sources: as dense ones where all pairs attend, trained, saved and loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from problems import refuses
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, Trainer, TrainingArguments

from sbm_pyg import (
    AttentionConv,
    AttentionGraph,
    Choice,
    GraphSource,
    SBMSource,
    Sparsifier,
    Tokens,
    auxiliary_loss,
    patterns,
    register_source,
    replace_attention,
    restore_attention,
)
from sbm_pyg.integrations import hugging_face, hugging_face_masks
from sbm_pyg.integrations.hugging_face import SparsifierCallback
from sbm_pyg.integrations.hugging_face_masks import MaskBias, PairMask, make_mask, read_mask
from sbm_pyg.layers import named

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "quiet_transformers")]

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT: dict[str, Any] = SIZES | {
    "vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"num_clusters": 4}
LENGTH = 12
REAL = torch.arange(LENGTH) < torch.tensor([[12], [7], [5], [1]])


def bert(**options: Any) -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT | options))


def roberta() -> Any:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TEXT | {"pad_token_id": 1}))


def distilbert() -> Any:
    sizes: Any = {
        "vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40,
    }  # fmt: skip
    config = transformers.DistilBertConfig(**sizes, initializer_range=0.2)
    return transformers.DistilBertForSequenceClassification(config)


def modernbert() -> Any:
    tokens: Any = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.ModernBertConfig(**TEXT | tokens | {"num_hidden_layers": 4}, local_attention=4)
    return transformers.ModernBertForSequenceClassification(config)


def vit() -> Any:
    config = transformers.ViTConfig(**SIZES, image_size=12, patch_size=4, initializer_range=0.2)
    return transformers.ViTForImageClassification(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2))


def gpt2(**options: Any) -> Any:
    sizes: Any = {
        "vocab_size": 50, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2,
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | options))


def causal_model(kind: str, **options: Any) -> Any:
    """A tiny model with random weights, in evaluation mode."""
    config = transformers.CONFIG_MAPPING[kind](**TEXT | {"num_key_value_heads": 2, "head_dim": 8} | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                each.normal_(0, 0.2)
    return model


def falcon_h1() -> Any:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}
    return causal_model("falcon_h1", **sizes)


def deepseek() -> Any:
    """Multi-head latent attention, whose values have another width than its queries."""
    widths = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 16, "q_lora_rank": 16}
    experts = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8,
    }  # fmt: skip
    return causal_model("deepseek_v3", **widths, **experts, num_key_value_heads=4, head_dim=4)


def t5() -> Any:
    sizes: Any = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes | {"decoder_start_token_id": 0}, initializer_factor=2.0)
    )


def layoutlm() -> Any:
    return transformers.LayoutLMForTokenClassification(transformers.LayoutLMConfig(**TEXT))


MODELS = {  # and names of the modules with a source
    "bert": (bert, [f"bert.encoder.layer.{n}.attention.self" for n in (0, 1)]),
    "roberta": (roberta, [f"roberta.encoder.layer.{n}.attention.self" for n in (0, 1)]),
    "distilbert": (distilbert, [f"distilbert.transformer.layer.{n}.attention" for n in (0, 1)]),
    "modernbert": (modernbert, [f"model.layers.{n}.attn" for n in (0, 3)]),  # others are local
    "vit": (vit, [f"vit.layers.{n}.attention" for n in (0, 1)]),
    "llama": (llama, [f"model.layers.{n}.self_attn" for n in (0, 1)]),
}
each_model = pytest.mark.parametrize("name", MODELS)


def inputs(model: Any, real: Tensor | None = REAL) -> dict[str, Tensor]:
    """Four sequences with padding on the right, or four images."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(4, 3, 12, 12)}
    tokens = torch.randint(3, 50, (4, LENGTH))
    return {"input_ids": tokens} | ({} if real is None else {"attention_mask": real.long()})


@torch.no_grad()
def run(model: Any, given: dict[str, Tensor], seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return model.eval()(**given, **options)


def logits(out: Any) -> Tensor:
    """Logits of all sequences, or of all real tokens."""
    return out.logits[REAL] if out.logits.dim() == 3 else out.logits


def sources(model: nn.Module) -> list[Any]:
    return [module.source for module in model.modules() if isinstance(module, AttentionConv)]


def make_sparse(model: Any, density: float = 0.3, **options: Any) -> Any:
    """The model with sources at a density, whose running means have seen a batch."""
    replace_attention(model, **OPTIONS | options, target_density=density)
    model.train()
    for _ in range(2):
        model(**inputs(model))
    return model.eval()


# ------------------------------------------------------------------ attention over all pairs


@each_model
def test_all_pairs_give_the_outputs_and_weights_of_eager_attention(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    given = inputs(model)
    model.set_attn_implementation("eager")
    eager = run(model, given, output_attentions=True)
    for options in (OPTIONS, {"source": "full"}):  # torch's dense kernel, and stored edges
        assert replace_attention(model, **options) == expected
        torch.testing.assert_close(logits(run(model, given)), logits(eager), rtol=0, atol=1e-5)
        out = run(model, given, output_attentions=True)
        torch.testing.assert_close(logits(out), logits(eager), rtol=0, atol=1e-5)
        assert len(out.attentions) == len(eager.attentions)
        rows = REAL[:, None, :, None] if name != "vit" else torch.ones(1, 1, 1, 1)
        for ours, theirs in zip(out.attentions, eager.attentions, strict=True):
            torch.testing.assert_close(ours * rows, theirs * rows, rtol=0, atol=1e-5)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(run(model, given)), logits(eager))


def test_the_dense_kernel_attends_as_long_as_the_target_density_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    replace_attention(model, **OPTIONS)
    called = []
    monkeypatch.setattr(SBMSource, "choose", lambda *_: called.append(1))
    run(model, inputs(model))
    for source in sources(model):
        source.target_density = 0.3
    refuses(lambda: run(model, inputs(model)), "Choice", TypeError)
    assert called == [1]


@pytest.mark.parametrize("left", [False, True])
def test_causal_attention_with_padding_on_either_side(left: bool) -> None:
    model = llama()
    real = REAL.flip(1) if left else REAL
    given = inputs(model, real)
    model.set_attn_implementation("eager")
    eager = run(model, given).logits[real]
    replace_attention(model, **OPTIONS)
    torch.testing.assert_close(run(model, given).logits[real], eager, rtol=0, atol=1e-5)


def test_an_encoder_and_a_decoder_keep_dense_cross_attention() -> None:
    sizes: Any = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 50, "max_position_embeddings": 40,
    }  # fmt: skip
    heads: Any = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    config = transformers.BartConfig(**sizes, **heads, encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.2)
    model = transformers.BartForConditionalGeneration(config)
    given = inputs(model) | {"decoder_input_ids": torch.randint(3, 50, (4, 9))}
    model.set_attn_implementation("eager")
    eager = run(model, given, output_attentions=True)
    parts = ["encoder.layers.0", "decoder.layers.0", "decoder.layers.1"]
    assert replace_attention(model, **OPTIONS) == [f"model.{part}.self_attn" for part in parts]
    out = run(model, given, output_attentions=True)
    torch.testing.assert_close(out.logits, eager.logits, rtol=0, atol=1e-5)
    for ours, theirs in zip(out.cross_attentions, eager.cross_attentions, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_weights_come_back_from_models_that_do_not_pass_the_argument_on() -> None:
    model = gpt2()
    replace_attention(model, **OPTIONS)
    assert [each.shape for each in run(model, inputs(model), output_attentions=True).attentions] == [(4, 4, 12, 12)] * 2
    assert run(model, inputs(model)).attentions is None


@pytest.mark.parametrize(
    "make",
    [lambda: causal_model("doge"), falcon_h1, deepseek, t5, layoutlm],
    ids=["doge", "falcon", "mla", "t5", "layoutlm"],
)
def test_models_that_read_their_mask_or_add_to_scores_equal_eager_attention(make: Any) -> None:
    model = make()
    given = inputs(model)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, 50, (4, LENGTH))
    model.set_attn_implementation("eager")
    eager = run(model, given)
    for options in (OPTIONS, {"source": "full"}):
        replace_attention(model, **options)
        scale = float(logits(eager).abs().max())
        torch.testing.assert_close(logits(run(model, given)), logits(eager), rtol=0, atol=1e-5 * scale)
    replace_attention(model, source="window", size=1)
    assert (logits(run(model, given)) - logits(eager)).abs().max() > 1e-2


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_a_bias_of_positions_learns_from_the_edges(density: float) -> None:
    model = t5()
    given = inputs(model) | {"labels": torch.randint(3, 50, (4, 9))}
    replace_attention(model, **OPTIONS)
    for source in sources(model):
        source.target_density = density
    (model.train()(**given).loss + auxiliary_loss(model)).backward()
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
    assert table.isfinite().all()
    assert table.any()
    assert all(source.head.clusters.grad.isfinite().all() for source in sources(model))


# ------------------------------------------------------------------ masks


def eager_mask_of(pairs: Tensor) -> Tensor:
    return torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)


def test_a_mask_that_is_read_is_that_of_eager_attention() -> None:
    real = REAL.flip(1)
    mask = make_mask(4, LENGTH, LENGTH, attention_mask=real)
    pairs = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & real[:, None, None]
    assert isinstance(mask, PairMask)
    assert (mask.shape, mask.dtype) == ((4, 1, LENGTH, LENGTH), torch.float32)
    assert make_mask(1, 10**7, 10**7).numel() == 10**14  # which takes no memory
    for ours, theirs in zip(
        (mask + 0, mask[:, :, 3:5], mask.bool(), mask == 0),
        (eager_mask_of(pairs), eager_mask_of(pairs)[:, :, 3:5], ~pairs, pairs),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
        assert type(ours) is Tensor


@pytest.mark.parametrize("kind", ["padding", "causal", "packed", "packed and causal", "other", "other and causal"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_what_a_mask_says_is_read_from_its_values(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for left in (False, True):
        real = REAL.flip(1) if left else REAL
        pairs = real[:, None, None].expand(4, 1, LENGTH, LENGTH)
        if "packed" in kind:
            number = (torch.rand(4, LENGTH, generator=generator) < 0.3).long().cumsum(1)
            pairs = pairs & (number[:, None, :, None] == number[:, None, None])
        if "other" in kind:
            pairs = pairs & ((torch.rand(pairs.shape, generator=generator) < 0.5) | torch.eye(LENGTH, dtype=torch.bool))
        if "causal" in kind:
            pairs = pairs.tril()
        found = read_mask(pairs if dtype == torch.bool else eager_mask_of(pairs), LENGTH, LENGTH)
        assert found.is_causal == ("causal" in kind)
        assert found.bias is None
        assert (found.allowed is not None) == ("other" in kind)
        assert (found.sequence is not None) == ("packed" in kind)
        dense = found.dense(LENGTH, LENGTH, pairs.device)
        assert dense is not None
        rows = real[:, None, :, None]
        assert torch.equal(dense & rows, pairs & rows)


@pytest.mark.parametrize("has_source", [True, False])
def test_a_mask_of_one_query_is_one_of_all(has_source: bool) -> None:
    model = bert()
    replace_attention(model, **OPTIONS)
    module = model.bert.encoder.layer[0].attention.self
    module.sbm = module.sbm if has_source else None
    tokens = torch.randn(3, 4, 4, LENGTH, 8)
    real = REAL & (torch.arange(LENGTH) != 1)
    mask = make_mask(4, 1, LENGTH, q_offset=LENGTH - 1, attention_mask=real)
    out, _ = hugging_face.attend(module.eval(), *tokens, mask)
    query, key, value = tokens
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=real[:, None, None])
    torch.testing.assert_close(out[real], expected.transpose(1, 2)[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_causal", [None, False, True])
def test_attention_without_a_mask_is_causal_only_if_its_module_says_so(is_causal: bool | None) -> None:
    model = bert()
    replace_attention(model, **OPTIONS)
    module = model.bert.encoder.layer[0].attention.self.eval()
    if is_causal is None:
        del module.is_causal
    else:
        module.is_causal = is_causal
    tokens = torch.randn(3, 4, 4, LENGTH, 8)
    out, _ = hugging_face.attend(module, *tokens, None)
    expected = nn.functional.scaled_dot_product_attention(tokens[0], tokens[1], tokens[2], is_causal=bool(is_causal))
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (2, 1, 9, 9), (2, 4, 9, 9)])
def test_what_a_mask_says_is_read_once_and_forgotten_with_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = (torch.rand(shape) < 0.7).to(dtype)
    before = len(hugging_face_masks._PAIRS)
    first = read_mask(mask, 9, 9)
    assert read_mask(mask, 9, 9) is first
    mask[..., 3] = 0
    again = read_mask(mask, 9, 9)  # after a change
    assert again is not first
    del mask, again, first
    assert len(hugging_face_masks._PAIRS) == before


def test_any_mask_of_pairs_equals_eager_attention_and_holds_on_a_sampled_graph() -> None:
    model = bert()
    pairs = torch.rand(4, 1, LENGTH, LENGTH) < 0.5
    pairs |= torch.eye(LENGTH, dtype=torch.bool)
    given = inputs(model, None) | {"attention_mask": pairs}
    model.set_attn_implementation("eager")
    eager = run(model, given | {"attention_mask": eager_mask_of(pairs)})
    replace_attention(model, **OPTIONS)
    torch.testing.assert_close(run(model, given).logits, eager.logits, rtol=0, atol=1e-5)
    labels = torch.tensor([0, 1, 0, 1])
    for density in (1.0, 0.3):
        for source in sources(model):
            source.target_density = density
        out = model.train()(**given, labels=labels, output_attentions=True)
        (out.loss + auxiliary_loss(model)).backward()
        assert all(not weights[~pairs.expand(4, 4, -1, -1)].any() for weights in out.attentions)
        assert sources(model)[0].head.clusters.grad.any()
        model.zero_grad()


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_a_loss_on_a_part_of_the_sequences_takes_the_bias_of_its_own(
    density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, totals, biased = t5(), [], MaskBias.__call__

    def note(self: MaskBias, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
        totals.append((graph.num_queries, self.batch.query.total))
        return biased(self, query, key, graph)

    replace_attention(model, **OPTIONS, estimator="distill")
    for source in sources(model):
        source.target_density = density
    monkeypatch.setattr(MaskBias, "__call__", note)
    model.train()(**inputs(model), labels=torch.randint(3, 50, (4, 9)))
    assert len(totals) >= 8
    assert all(of_graph == of_batch for of_graph, of_batch in totals)


@pytest.mark.parametrize("density", [1.0, 0.5])
@pytest.mark.parametrize("make", [bert, llama])
def test_packed_sequences_do_not_see_each_other(make: Any, density: float) -> None:
    model = make()
    replace_attention(model, source="top_k", target_density=density)
    lengths = (5, 1, 6)
    tokens = torch.randint(3, 50, (1, LENGTH))
    alone = torch.cat([run(model.base_model, {"input_ids": x}).last_hidden_state for x in tokens.split(lengths, 1)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    number = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed: list[dict[str, Any]] = [
        {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}, {"seq_idx": number},
        {"attention_mask": (number[:, None, :, None] == number[:, None, None]).tril() if make is llama else
         number[:, None, :, None] == number[:, None, None]},
    ]  # fmt: skip
    packed += [{"use_cache": False}] if make is llama else []  # as the positions tell
    for options in packed:
        together = run(model.base_model, {"input_ids": tokens, "position_ids": positions}, **options)
        torch.testing.assert_close(together.last_hidden_state, alone, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ sampled graphs


@pytest.mark.parametrize("make", [bert, llama])
def test_values_of_padding_do_not_matter(make: Any) -> None:
    model = make_sparse(make())
    given = inputs(model)
    expected = run(model, given)
    given["input_ids"] = torch.where(REAL, given["input_ids"], 7)
    assert torch.equal(logits(run(model, given)), logits(expected))


def test_no_output_depends_on_later_tokens() -> None:
    model = make_sparse(llama())
    given = inputs(model, None)
    expected = run(model, given).logits
    given["input_ids"][:, 8:] = 7
    changed = run(model, given).logits
    torch.testing.assert_close(changed[:, :8], expected[:, :8], rtol=0, atol=1e-6)
    assert (changed[:, 8:] - expected[:, 8:]).abs().amax(-1).min() > 1e-3


def test_weights_are_those_of_the_graph() -> None:
    model = make_sparse(bert(), 0.2)
    out = run(model, inputs(model), output_attentions=True)
    pairs = (REAL[:, None, :, None] & REAL[:, None, None]).expand(4, 4, LENGTH, LENGTH)
    for weights in out.attentions:
        assert not weights[~pairs].any()
        torch.testing.assert_close(weights.sum(-1), REAL[:, None].expand(4, 4, LENGTH).float())
        assert 0.15 < (weights[pairs] > 0).float().mean() < 0.5  # and self-loops
        assert (weights.diagonal(dim1=2, dim2=3)[REAL[:, None].expand(4, 4, LENGTH)] > 0).all()
    torch.testing.assert_close(logits(run(model, inputs(model))).shape, logits(out).shape)


def test_weights_of_blocks_are_those_of_their_tokens() -> None:
    model = make_sparse(bert(), 0.4, block_size=2)
    weights = run(model, inputs(model), output_attentions=True).attentions[0][0]  # no padding
    edges = weights > 0
    assert torch.equal(edges[:, 0::2, 0::2], edges[:, 1::2, 1::2])
    assert 0 < edges.float().mean() < 0.9


def test_dropout_is_that_of_the_model() -> None:
    model = bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    given = inputs(model)
    model.set_attn_implementation("eager")
    eager = run(model, given).logits
    replace_attention(model, source="full")
    torch.testing.assert_close(run(model, given).logits, eager, rtol=0, atol=1e-5)
    model.train()
    first, second = model(**given).logits, model(**given).logits
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant: bool, density: float) -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        replace_attention(model, **OPTIONS)
        Sparsifier(model, 0.3, 10, dense_part=1.0 if density == 1 else 0.0)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(1)
        model.train()(**inputs(model), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    for name, grad in found[0].items():
        assert (grad is None) == (found[1][name] is None), name
        if grad is not None:
            torch.testing.assert_close(found[1][name], grad, msg=name)
    assert any("sbm" in name and grad is not None and grad.any() for name, grad in found[0].items())


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_autocast_of_rotary_positions(density: float) -> None:
    """They are in single precision, and values are not."""
    model = make_sparse(llama())
    for source in sources(model):
        source.target_density = density
    given = inputs(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.train()(**given, labels=given["input_ids"])
        (out.loss + auxiliary_loss(model)).backward()
        low = run(model, given).logits
    assert low.dtype == torch.bfloat16
    assert all(source.head.clusters.grad.isfinite().all() for source in sources(model))
    if density == 1:
        torch.testing.assert_close(low[REAL].float(), run(model, given).logits[REAL], rtol=0, atol=0.1)


# ------------------------------------------------------------------ generation


def generate(model: Any, **options: Any) -> Any:
    """Ten tokens after prompts with padding on the left."""
    real = REAL.flip(1)[:3]
    tokens = torch.randint(3, 50, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return model.eval().generate(
        tokens, attention_mask=real.long(), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("use_cache", [True, False])
def test_evaluation_and_greedy_generation_repeat(use_cache: bool, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).eval()
    replace_attention(model, num_clusters=4, target_density=0.3)
    tokens = torch.randint(3, 50, (2, 20))
    logits = model(tokens).logits
    texts = [model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=use_cache) for _ in range(2)]
    assert torch.equal(*texts)
    assert torch.equal(model(tokens).logits, logits)
    first, second = (layer.self_attn.sbm.conv for layer in model.model.layers)
    assert (first.eval_seed, second.eval_seed) == (0, 1)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, logits)
    first.eval_seed = None
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_generation_equals_that_of_eager_attention(make: Any) -> None:
    model = make()
    model.set_attn_implementation("eager")
    expected = generate(model)
    replace_attention(model, **OPTIONS)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, use_cache=False), expected)


def test_a_cache_changes_nothing_where_the_graph_is_not_random() -> None:
    model = llama()
    dense = generate(model)
    for size in ({"k": 3, "window": 1}, {"target_density": 0.3}):
        replace_attention(model, source="top_k", **size)
        assert torch.equal(generate(model), generate(model, use_cache=False))
        assert not torch.equal(generate(model), dense)


def test_new_tokens_attend_to_sampled_keys_and_to_their_window() -> None:
    model = make_sparse(llama(), 0.3, window=1)
    out = generate(model, output_attentions=True, return_dict_in_generate=True)
    found = [step[0][0, :, 0] for step in out.attentions[1:]]  # of the sequence without padding, [H, S]
    assert [each.size(1) for each in found] == [*range(13, 22)]
    for weights in found:
        assert (weights[:, -2:] > 0).all()
        torch.testing.assert_close(weights.sum(1), torch.ones(4))
    density = torch.cat([(each[:, :-2] > 0).float().flatten() for each in found]).mean()
    assert 0.1 < density < 0.6


class AllTokens(GraphSource):
    """All pairs, as of one set of tokens."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, tokens: Tokens) -> Choice:
        return Choice(patterns.full(None, ptr=tokens.key_ptr, is_causal=tokens.is_causal))


FIXED: list[dict[str, Any]] = [  # sources whose graphs are not random
    {"source": "full"}, {"source": "window", "size": 2}, {"source": "global_tokens", "num_global": 2},
    {"source": "bigbird", "size": 1, "num_global": 1, "num_random": 2, "seed": 0}, {"source": "top_k", "k": 3},
    {"source": "top_k", "k": 2, "window": 1}, {"num_clusters": 4},
]  # fmt: skip


@pytest.mark.parametrize("options", FIXED, ids=lambda options: "-".join(map(str, options.values())))
def test_a_cache_and_several_new_tokens_change_nothing(options: dict[str, Any]) -> None:
    """Those of a cache that grows and of a static one, and those of assisted generation."""
    model = llama()
    replace_attention(model, **options)
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, cache_implementation="static"), expected)
    tokens = expected[:1]
    with torch.no_grad():
        whole = model(tokens, output_attentions=True)
        cache = model(tokens[:, :9]).past_key_values
        parts = [
            model(part, past_key_values=cache, output_attentions=True) for part in tokens[:, 9:].split((4, 1, 8), 1)
        ]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), whole.logits[:, 9:], rtol=0, atol=1e-5)
    for part, start in zip(parts, (9, 13, 14), strict=True):
        for ours, theirs in zip(part.attentions, whole.attentions, strict=True):
            rows = theirs[:, :, start : start + ours.size(2), : ours.size(3)]
            torch.testing.assert_close(ours, rows, rtol=0, atol=1e-5)
    alone = model.generate(tokens[:, :9], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assisted = model.generate(
        tokens[:, :9], assistant_model=llama().eval(), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(assisted, alone)


def test_what_a_cache_does_not_allow_names_the_way_out() -> None:
    model = llama()
    for options in ({"block_size": 2}, {"tied": True}):
        replace_attention(model, **OPTIONS | options, target_density=0.5)
        assert generate(model, use_cache=False).shape == (3, 22)
        with pytest.raises(
            ValueError, match=r"same tokens as queries and keys.* Pass use_cache=False and no assistant"
        ):
            generate(model)
    for source in (AllTokens(), AllTokens(window=1)):
        for layer in model.model.layers:
            layer.self_attn.sbm.conv.source = source
        assert generate(model, use_cache=False).shape == (3, 22)
        with pytest.raises(ValueError, match=r"'source' to return a graph over N = 3 queries .* Pass use_cache=False"):
            generate(model)


# ------------------------------------------------------------------ training, saving and loading


class Rows(torch.utils.data.Dataset):
    def __init__(self, model: Any) -> None:
        torch.manual_seed(0)
        self.batches = [inputs(model) for _ in range(4)]
        self.causal = model.can_generate()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = {name: each[number % 4] for name, each in self.batches[number // 4].items()}
        return row | {"labels": row["input_ids"] if self.causal else torch.tensor(number % 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "modernbert", "vit", "llama"])
def test_trainer_trains_saves_and_loads(name: str, tmp_path: Path) -> None:
    make, expected = MODELS[name]
    model = make()
    replace_attention(model, **OPTIONS)
    before = {name: each.clone() for name, each in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, learning_rate=1e-3,
    )  # fmt: skip
    callback = SparsifierCallback(0.3, trial_interval=2, dense_part=0.5)
    trainer = Trainer(model, arguments, train_dataset=Rows(model), callbacks=[callback])
    trainer.train()
    assert {source.target_density for source in sources(model)} == {0.3}
    still = [name for name, each in model.named_parameters() if "sbm" in name and torch.equal(each, before[name])]
    assert not still
    trainer.save_model()
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert len(sources(again)) == len(expected)
    assert {source.target_density for source in sources(again)} == {0.3}
    given = inputs(model)
    assert torch.equal(run(again, given).logits, run(model, given).logits)
    layers = [layer for layer in again.modules() if isinstance(layer, AttentionConv)]
    for layer in layers:
        layer.eval_seed = 100
    assert not torch.equal(run(again, given).logits, run(model, given).logits)  # another graph
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(run(type(model).from_pretrained(tmp_path / "twice"), given).logits, run(model, given).logits)


def test_a_checkpoint_of_each_phase_has_the_density_of_evaluation(tmp_path: Path) -> None:
    model = bert()
    replace_attention(model, **OPTIONS)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        use_cpu=True, eval_strategy="steps", eval_steps=2, save_steps=2,
    )  # fmt: skip
    callback = SparsifierCallback(0.3, trial_interval=2, dense_part=0.75)
    rows = Rows(model)
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback]).train()
    for step in (2, 4):  # dense, and sparse
        again = type(model).from_pretrained(tmp_path / f"checkpoint-{step}")
        for is_training in (True, False):
            assert {source.target_density for source in sources(again.train(is_training))} == {0.3}


def test_a_dense_model_from_a_folder_gets_sources_while_it_is_loaded(tmp_path: Path) -> None:
    dense = bert()
    dense.save_pretrained(tmp_path)
    load: Any = AutoModelForSequenceClassification.from_pretrained
    model, report = load(tmp_path, attn_implementation="sbm", sbm={"num_clusters": 4}, output_loading_info=True)
    assert report["missing_keys"]
    assert all(".sbm." in key for key in report["missing_keys"])
    assert model.config.sbm == {"source": "sbm", "num_clusters": 4}
    given = inputs(model)
    torch.testing.assert_close(run(model, given).logits, run(dense, given).logits, rtol=0, atol=1e-5)
    for source in sources(model):
        assert source.target_density == 1
        clusters = source.head.clusters.detach()
        torch.testing.assert_close(clusters @ clusters.mT, torch.eye(4).expand(4, 4, 4), rtol=0, atol=1e-5)
        assert not source.running_mean.any()
        assert 0.25 < source.head.mlp[0].weight.abs().max() < 0.36  # that of torch, not of the model's initializer
    with torch.no_grad():
        sources(model)[0].head.clusters.add_(1)
    trained = {name: each.clone() for name, each in model.state_dict().items()}
    model.initialize_weights()  # as transformers does for each model that contains this one
    assert all(torch.equal(each, trained[name]) for name, each in model.state_dict().items())
    half = load(tmp_path, attn_implementation="sbm", dtype=torch.bfloat16)
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}
    assert run(half, given).logits.isfinite().all()
    assert sources(half)[0].head.num_clusters == 64


def test_a_sparse_folder_is_dense_on_request_and_loads_into_other_heads(tmp_path: Path) -> None:
    model = make_sparse(bert())
    model.save_pretrained(tmp_path)
    given = inputs(model)
    eager = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    model.set_attn_implementation("eager")
    assert torch.equal(run(eager, given).logits, run(model, given).logits)
    model.set_attn_implementation("sbm")
    body = AutoModel.from_pretrained(tmp_path)
    expected = run(model.bert, given).last_hidden_state
    assert torch.equal(run(body, given).last_hidden_state, expected)
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    assert len(sources(fresh)) == 2


@pytest.mark.parametrize(
    "options",
    [{"source": "indexer", "index_heads": 2, "target_density": 0.3},
     {"source": "indexer", "select": "top_k", "k": 3, "estimator": "imitate"},
     {"source": "routing", "num_clusters": 3, "window": 1}, {"source": "top_k", "k": 3},
     {"source": "top_k", "target_density": 0.3}, {"source": "bigbird", "size": 1, "num_global": 1, "num_random": 1},
     {"num_clusters": 4, "target_density": None, "parameterization": "mixed"},
     {"num_clusters": 4, "target_density": 0.4, "block_size": 2, "pool": "learned", "budget": 4, "probes": 8.0}],
    ids=lambda options: f"{options.get('source', 'sbm')}-{len(options)}",
)  # fmt: skip
def test_every_kind_of_source_is_saved_and_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    model = bert()
    replace_attention(model, **options)
    model.train()
    for _ in range(2):
        out = model(**inputs(model), labels=torch.tensor([0, 1, 0, 1]))
        (out.loss + auxiliary_loss(model)).backward()
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    given = inputs(model)
    assert torch.equal(run(again, given).logits, run(model, given).logits)
    for one, two in zip(sources(model), sources(again), strict=True):
        assert getattr(one, "target_density", 0) == getattr(two, "target_density", 0)


@pytest.mark.parametrize("name", ["top_k", "indexer"])
def test_a_model_with_a_number_of_keys_is_loaded_with_a_density(name: str, tmp_path: Path) -> None:
    model = bert()
    replace_attention(model, source=name, k=3)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, sbm={"source": name, "target_density": 0.4})
    assert [source.target_density for source in sources(again)] == [0.4, 0.4]
    again.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, sbm={"source": name, "k": 3})
    assert [source.target_density for source in sources(again)] == [0.4, 0.4]  # of the file: 3 keys or more
    for source in sources(again):
        cast(Any, source).target_density = None
    given = inputs(model)
    assert torch.equal(run(again, given).logits, run(model, given).logits)


def test_state_dict_restores_the_target_density() -> None:
    model, other = make_sparse(bert()), bert()
    replace_attention(other, **OPTIONS)
    assert {source.target_density for source in sources(other)} == {1.0}
    other.load_state_dict(model.state_dict())
    assert {source.target_density for source in sources(other)} == {0.3}
    assert all(isinstance(value, Tensor) for value in model.state_dict().values())


@pytest.mark.slow
def test_only_the_sources_of_a_frozen_model_are_distilled(tmp_path: Path) -> None:
    model = bert()
    replace_attention(model, **OPTIONS)
    for name, each in model.named_parameters():
        each.requires_grad_(".sbm." in name or "classifier" in name)
    before = {name: each.clone() for name, each in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True
    )
    Trainer(model, arguments, train_dataset=Rows(model), callbacks=[SparsifierCallback(0.3, trial_interval=2)]).train()
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if ".sbm." in name or "classifier" in name}


# ------------------------------------------------------------------ what is refused


def test_models_without_such_attention_are_refused() -> None:
    sizes: Any = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = transformers.DebertaV2Config(**sizes, intermediate_size=48)
    with pytest.raises(ValueError, match=r"Expected 'model' to have self-attention .* \(got none in DebertaV2Model\)"):
        replace_attention(transformers.DebertaV2Model(config))
    with pytest.raises(ValueError, match=r"'attn_implementation' selects \(got DebertaV2Model, which has its own\)"):
        AutoModel.from_config(config, attn_implementation="sbm")
    config = transformers.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=4)
    with pytest.raises(ValueError, match="2 of them in windows or between encoder and decoder in MistralModel"):
        replace_attention(transformers.MistralModel(config))
    config.sliding_window = None
    assert len(replace_attention(transformers.MistralModel(config), **OPTIONS)) == 2


def test_models_inside_a_model_are_all_replaced_or_none() -> None:
    """As in a model of sentences around an encoder, or two encoders in one."""
    model: Any = nn.ModuleDict({"first": bert(), "second": bert()})
    names = replace_attention(model, **OPTIONS)
    assert names[::2] == [f"{name}.bert.encoder.layer.0.attention.self" for name in model]
    assert restore_attention(model) == names
    config: Any = transformers.DebertaV2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    replace_attention(model, **OPTIONS)
    before, first = sources(model), sources(model["first"])
    model["second"] = transformers.DebertaV2Model(config)
    with pytest.raises(ValueError, match="got none in DebertaV2Model"):
        replace_attention(model, source="top_k", k=2)
    assert [*map(id, sources(model))] == [*map(id, first)]  # those of before, not dense
    assert len(before) == 2 * len(first)
    assert model["first"].config.sbm["source"] == "sbm"
    assert restore_attention(model) == [name for name in names if name.startswith("first")]  # the second has none
    with pytest.raises(ValueError, match=r"to have graph sources \(got none in BertForSequence\w*, DebertaV2Model\)"):
        restore_attention(model)


def test_options_are_checked() -> None:
    model = bert()
    with pytest.raises(TypeError, match=r"Expected 'options' to be what a config can save .*function"):
        replace_attention(model, score_bias=lambda *_: 0)
    refuses(lambda: replace_attention(model, dropout=0.1), "Expected 'options' without ['dropout']", TypeError)
    refuses(lambda: replace_attention(model, num_clusters=None), "Expected 'num_clusters' to be an int", TypeError)
    assert model.config.sbm is None
    assert not sources(model)
    replace_attention(model, num_clusters=np.int64(4), target_density=np.float32(0.25), window=np.int64(0))
    assert model.config.sbm == {"source": "sbm", "num_clusters": 4, "target_density": 0.25, "window": 0}
    json.dumps(model.config.sbm)


def test_the_state_of_a_callback_is_plain_data() -> None:
    names = {"bert.encoder.layer.0"}
    callback = SparsifierCallback(
        cast(Any, np.float32(0.25)), trial_interval=np.int64(2), keep_dense=names, dense_part=0
    )
    state = json.loads(json.dumps(callback.state()))
    assert state["args"] == {"density": 0.25, "trial_interval": 2, "keep_dense": [*names], "dense_part": 0}
    assert SparsifierCallback(**state["args"]).options["trial_interval"] == 2


def test_calls_that_are_not_supported_are_refused() -> None:
    model = bert()
    model.set_attn_implementation("sbm")
    with pytest.raises(ValueError, match=r"Expected 'model' with graph sources .*\.replace_attention\(model\)"):
        run(model, inputs(model))
    replace_attention(model, **OPTIONS)
    padded = run(model, inputs(model) | {"attention_mask": torch.zeros(4, LENGTH, dtype=torch.long)})
    assert padded.logits.isfinite().all()
    with pytest.raises(ValueError, match=r"Expected attention without \['block_indices'\] \(got them from BertSelfAtt"):
        run(model, inputs(model), block_indices=torch.arange(3))
    ends = torch.tensor([0, 5, LENGTH])
    with pytest.raises(ValueError, match=r"Expected 'cu_seq_lens_q' to be offsets .* \(got \[0, 5, 12\] for 4 rows"):
        run(model, inputs(model), cu_seq_lens_q=ends)
    with pytest.raises(
        ValueError, match=r"Expected 'attention_mask' of 12 queries and 12 keys \(got \[4, 1, 3, 12\]\)"
    ):
        run(model, inputs(model) | {"attention_mask": torch.ones(4, 1, 3, LENGTH, dtype=torch.bool)})


def sparse_minimax() -> Any:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 8}
    kinds = ["minimax_m3_sparse", "full_attention"]
    return causal_model("minimax_m3_vl_text", **sizes, index_block_size=4, index_topk_blocks=1, layer_types=kinds)


@pytest.mark.parametrize(
    ("make", "name"),
    [(sparse_minimax, "block_indices"), (lambda: causal_model("gemma2"), "softcap")],
    ids=["sparse attention of its own", "capped scores"],
)
def test_models_whose_attention_is_another_function_are_refused_as_they_are(make: Any, name: str) -> None:
    model = make()
    given = inputs(model)
    before, config, keys = run(model, given).logits, model.config.to_dict(), [*model.state_dict()]
    refuses(lambda: replace_attention(model, **OPTIONS), f"queries, keys, values and a mask define (got '{name}' of")
    assert (model.config.to_dict(), [*model.state_dict()]) == (config, keys)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(run(model, given).logits, before)


def test_stages_of_other_widths_have_sources_of_their_own() -> None:
    sizes: Any = {"hidden_size": 16, "num_attention_heads": 1, "blocks_per_stage": [1, 1, 1, 1], "mlp_ratio": 1.0}
    stages: Any = {"embed_dim_per_stage": [16, 32, 64, 128], "num_attention_heads_per_stage": [1, 2, 4, 8]}
    more: Any = {"global_attention_blocks": [0], "image_size": [64, 64], "window_size_per_stage": [4, 4, 4, 4]}
    images = torch.randn(1, 3, 64, 64)
    model = transformers.Sam2HieraDetModel(transformers.Sam2HieraDetConfig(**sizes, **stages, **more)).eval()
    with torch.no_grad():
        dense = model(images).last_hidden_state
        assert len(replace_attention(model, **OPTIONS)) == 4
        torch.testing.assert_close(model(images).last_hidden_state, dense, rtol=0, atol=1e-4)


def test_a_cap_that_is_off_is_no_reason_to_refuse() -> None:
    model = causal_model("gemma2", attn_logit_softcapping=None)
    given = inputs(model)
    before = run(model, given).logits[REAL]
    assert replace_attention(model, **OPTIONS) == ["model.layers.1.self_attn"]  # the other one has a window
    torch.testing.assert_close(run(model, given).logits[REAL], before, rtol=0, atol=1e-4)


# ------------------------------------------------------------------ there and back


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_restored_attention_is_that_of_before(before: str, tmp_path: Path) -> None:
    model = bert()
    model.set_attn_implementation(before)
    given, config, keys = inputs(model), model.config.to_dict(), [*model.state_dict()]
    dense = run(model, given).logits
    names = replace_attention(model, **OPTIONS)
    assert replace_attention(model, source="top_k", k=2) == names  # again, with other sources
    assert not torch.equal(run(model, given).logits, dense)
    assert model.config.sbm == {"source": "top_k", "k": 2}
    assert restore_attention(model) == names
    assert torch.equal(run(model, given).logits, dense)
    assert (model.config.to_dict(), [*model.state_dict()]) == (config, keys)
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match=r"Expected 'model' to have graph sources \(got none in BertForSequenceClass"):
        restore_attention(model)
    replace_attention(model, **OPTIONS)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert restore_attention(again) == names
    torch.testing.assert_close(run(again, given).logits, dense, rtol=0, atol=1e-5)
    again.save_pretrained(tmp_path / "dense")
    assert "sbm" not in (tmp_path / "dense" / "config.json").read_text()
    fresh, report = type(model).from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(run(fresh, given).logits, dense, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_only_this_module_registers_the_implementation(tmp_path: Path) -> None:
    model = bert()
    replace_attention(model, **OPTIONS)
    model.save_pretrained(tmp_path)
    code = f"""
import sbm_pyg, transformers
assert "sbm" not in transformers.AttentionInterface().valid_keys()
try:
    transformers.AutoModel.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    assert 'attn_implementation="sbm"` is not supported' in str(error)
else:
    raise AssertionError("a sparse model is not loaded as a dense one")
before = transformers.PreTrainedModel.post_init
import importlib, sbm_pyg.integrations.hugging_face as ours
assert "sbm" in transformers.AttentionInterface().valid_keys()
importlib.reload(ours)
assert transformers.PreTrainedModel.post_init._sbm_original is before
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ sources of users


class Even(GraphSource):
    """Learned scores of keys alone, over keys at even positions; it has a parameter, an option and a target density."""

    def __init__(self, channels: int, heads: int, start: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((heads, channels), start))

    def forward(self, tokens: Tokens) -> Choice:
        graph = patterns.full(None, ptr=tokens.query_ptr)
        return Choice(graph.select(graph.edge_index[0] % 2 == 0)).expand(tokens.heads)


def test_sources_of_users_are_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_OWN", {})
    for name, made, error, message in (
        ("sbm", Even, ValueError, "Expected 'name' to be new"),
        ("even", 3, TypeError, "Expected 'make' to be a function"),
    ):
        with pytest.raises(error, match=message):
            register_source(name, cast(Any, made))
    model = bert().eval()
    with pytest.raises(ValueError, match=r"Expected 'source' to be one of .*Call `sbm_pyg\.register_source`"):
        replace_attention(model, source="even")
    register_source("even", Even)
    register_source("wrong", cast(Any, lambda *_: nn.Identity()))
    with pytest.raises(TypeError, match="Expected 'source' to be a GraphSource, made by 'wrong'"):
        replace_attention(model, source="wrong")
    replace_attention(model, source="even", start=0.25)
    source = cast(Any, model).bert.encoder.layer[1].attention.self.sbm.conv.source
    assert isinstance(source, Even)
    assert bool((source.weight == 0.25).all())
    with torch.no_grad():
        source.weight.fill_(3.0)
    tokens = torch.randint(2, 50, (2, 9))
    wanted = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens).logits, wanted)
    assert bool((cast(Any, again).bert.encoder.layer[1].attention.self.sbm.conv.source.weight == 3).all())
    named._OWN.clear()
    with pytest.raises(ValueError, match=r"\(got 'even'\)\. Call `sbm_pyg\.register_source`"):
        transformers.BertForSequenceClassification.from_pretrained(tmp_path)
