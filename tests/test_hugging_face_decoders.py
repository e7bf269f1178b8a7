"""Decoders with a cache, and with packed sequences: rows are those of the whole sequence, and of the padded batch."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sbm_pyg import replace_attention, restore_attention
from sbm_pyg.integrations.hugging_face_attention import GraphAttention, KeptKeys
from sbm_pyg.layers.attention import AttentionConv
from sbm_pyg.ops.cpu.memberships import KeyMemberships

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "quiet_transformers")]

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "sliding_window": None,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
LOCAL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LATENT: dict[str, Any] = {  # attention whose values have another width than its keys
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
}  # fmt: skip
SIZES_OF: dict[str, dict[str, Any]] = {
    "gpt2": GPT2, "bloom": GPT2, "gemma3_text": SIZES | LOCAL, "deepseek_v3": SIZES | LATENT | EXPERTS,
    "minicpm3": SIZES | LATENT | {"dim_model_base": 32},
    "falcon": {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "mpt": {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "use_cache": True},
}  # fmt: skip
MODELS = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma3_text"]
LATER_MODELS = ["deepseek_v3", "minicpm3", "bloom", "falcon", "mpt"]  # with latent attention, and with ALiBi
NEAR: dict[str, Any] = {"window": 1, "num_sinks": 2}
SOURCES: dict[str, dict[str, Any]] = {
    "full": {"source": "full"}, "window": {"source": "window", "size": 2, "num_sinks": 1},
    "relay_queries": {"source": "relay_queries", "num_relays": 40},
    "bigbird": {"source": "bigbird", "size": 1, "num_global": 1, "num_random": 2}, "top_k": {"source": "top_k", "k": 3},
    "top_k, density": {"source": "top_k", "target_density": 0.2, "k": 2, **NEAR},
    "top_k, budgets": {"source": "top_k", "target_density": 0.2, **NEAR},
    "block_top_k": {"source": "block_top_k", "k": 2, "block_size": 4, **NEAR},
    "lsh": {"source": "lsh", "num_buckets": 4, "chunk_size": 3, "rounds": 2, **NEAR},
    "routing": {"source": "routing", "num_clusters": 3, **NEAR},
    "indexer": {"source": "indexer", "target_density": 0.3, **NEAR},
    "indexer, drawn": {"source": "indexer", "select": "bernoulli", "target_density": 0.4, **NEAR},
    "key_selection": {"source": "key_selection", "k": 3, "window": 0}, "sbm": {"num_clusters": 4},
    "sbm, density": {"num_clusters": 4, "target_density": 0.3, **NEAR},
    "sbm, no mean": {"num_clusters": 4, "target_density": 0.3, **NEAR},
    "sbm, budget": {"num_clusters": 4, "budget": 2.5, "row_group": 1, "parameterization": "mixed"},
    "sbm, candidates": {"num_clusters": 4, "target_density": 0.2, "candidates": 2.0, "window": None, "num_sinks": 1},
    "sbm, budgets": {"num_clusters": 4, "target_density": 0.2, "candidates": 3.0, **NEAR},
    "sbm, fastrg": {"num_clusters": 4, "method": "fastrg"},
}  # fmt: skip
PAIRS = [  # a third of all: four models of each source, seven sources of each model; half of them are fast tests
    pytest.param(model, source, marks=pytest.mark.slow if (m + s) % 6 else [], id=f"{model}-{source}")
    for m, model in enumerate([*MODELS, *LATER_MODELS])
    for s, source in enumerate(SOURCES)
    if (m + s) % 3 == 0
]


def decoder(kind: str, source: str | None = None, **changes: Any) -> Any:
    """A tiny decoder of random weights with a source in each layer, whose running means have seen a batch."""
    config = transformers.CONFIG_MAPPING[kind](**SIZES_OF.get(kind, SIZES) | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    if source is not None:
        replace_attention(model, **SOURCES[source])
        model.train()(text(2, 20))
        model.train()(text(2, 20))
        for part in model.modules():
            if isinstance(part, AttentionConv) and source.endswith("budgets"):
                part.get_submodule("source").head_budgets = torch.linspace(0.3, 6.0, part.heads)
        for name, mean in model.named_buffers():
            if source == "sbm, no mean" and name.endswith("running_mean"):
                mean[: len(mean) // 2] = 0  # of a half of the heads
    return model.eval()


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, others: Tensor) -> None:
    torch.testing.assert_close(ours, others, rtol=0, atol=1e-5)


def static_cache(model: Any, length: int) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=length)


@pytest.mark.parametrize(("kind", "source"), PAIRS)
@torch.no_grad()
def test_new_tokens_get_the_rows_of_the_whole_sequence(kind: str, source: str) -> None:
    """One token and several at once, after a cache that grows or has free places, with padding on either side."""
    model, tokens, has_weights = decoder(kind, source), text(3, 24), kind != "mpt"
    whole = model(tokens, output_attentions=has_weights)
    assert all(isinstance(x, AttentionConv) and x.source for x in model.modules() if isinstance(x, AttentionConv))
    caches = [transformers.DynamicCache(config=model.config)]
    if kind != "falcon":  # which adds positions of the tokens that it has to a mask of all places
        caches.append(static_cache(model, 30))
    for cache in caches:
        parts = tokens.split((9, 4, 1, 10), 1)
        out = [model(part, past_key_values=cache, output_attentions=has_weights) for part in parts]
        close(torch.cat([part.logits for part in out], 1), whole.logits)
        for part, start in zip(out, (0, 9, 13, 14), strict=True) if has_weights else ():
            for weights, all_weights in [*zip(part.attentions, whole.attentions, strict=True)][-1:]:
                rows = all_weights[:, :, start : start + weights.size(2)]
                reach = min(weights.size(3), rows.size(3))
                close(weights[..., :reach], rows[..., :reach])
                assert not weights[..., reach:].any()
    for left in (True, False):  # padding, of which the second call has some if it is on the right
        real = torch.arange(24) < torch.tensor([[24], [17], [20]])
        real = real.flip(1) if left else real
        whole = model(tokens, attention_mask=real.long()).logits
        cache = model(tokens[:, :15], attention_mask=real[:, :15].long()).past_key_values
        rows = model(tokens[:, 15:], attention_mask=real.long(), past_key_values=cache).logits
        close(rows[real[:, 15:]], whole[:, 15:][real[:, 15:]])


DRAWN = ["sbm", "sbm, density", "sbm, candidates", "sbm, no mean", "sbm, budgets"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        pytest.param(source, kind, marks=pytest.mark.slow if kind == "deepseek_v3" else [])
        for s, source in enumerate(["window", "top_k", "top_k, density", "top_k, budgets", "indexer", *DRAWN])
        for kind in ("llama", ("gpt2", "deepseek_v3")[s % 2])
    ],
)
@torch.no_grad()
def test_rows_of_new_tokens_need_no_graph(kind: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = decoder(kind, source), text(3, 24)
    whole = model(tokens).logits
    left = torch.arange(24) >= torch.tensor([[0], [7], [2]])
    padded = model(tokens, attention_mask=left.long()).logits
    monkeypatch.setattr(GraphAttention, "_last_rows", None)  # which makes graphs
    for cache in (transformers.DynamicCache(config=model.config), static_cache(model, 30)):
        parts = [model(part, past_key_values=cache).logits for part in tokens.split((9, 1, 4, 10), 1)]
        close(torch.cat(parts, 1), whole)
    cache, start = transformers.DynamicCache(config=model.config), 0
    for part in tokens.split((9, 1, 14), 1):
        end = start + part.size(1)
        rows = model(part, past_key_values=cache, attention_mask=left[:, :end].long()).logits
        close(rows[left[:, start:end]], padded[:, start:end][left[:, start:end]])
        start = end


@pytest.mark.parametrize("source", ["sbm, density", "sbm, candidates"])
@torch.no_grad()
def test_memberships_of_keys_are_kept_while_a_cache_stays_as_it_is(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other, tokens = decoder("llama", source), decoder("llama"), text(3, 24)
    append, counts = KeyMemberships.append, []

    def count(kept: KeyMemberships, member: Tensor) -> None:
        counts.append(member.size(1) // 3)
        append(kept, member)

    monkeypatch.setattr(KeyMemberships, "append", count)

    def check(tokens: Tensor, cache: Any, computed: int) -> None:
        """New tokens compute the memberships of so many keys, and attend as after a copy, of which nothing is kept."""
        copied = copy.deepcopy(cache)
        counts.clear()
        rows = model(tokens, past_key_values=cache).logits
        assert counts == [computed] * 2
        counts.clear()
        close(rows, model(tokens, past_key_values=copied).logits)
        assert counts == [cache.get_seq_length()] * 2

    cache: Any = transformers.DynamicCache(config=model.config)
    model(tokens[:, :9], past_key_values=cache)
    check(tokens[:, 9:10], cache, 10)
    check(tokens[:, 10:14], cache, 4)
    cache.crop(-3)
    check(tokens[:, 14:15], cache, 1)
    cache.crop(-2)
    other(tokens[:, :3], past_key_values=cache)
    cache.crop(-1)
    check(tokens[:, 10:13], cache, 15)
    check(tokens[:, 13:14], cache, 1)
    cache.reorder_cache(torch.tensor([2, 0, 0]))  # beam search
    check(tokens[:, 17:18], cache, 17)
    cache.layers[0].keys[:, :, 3] = 0.5
    cache.layers[1].keys[:, :, 3] = 0.5
    check(tokens[:, 17:18], cache, 18)
    for layer in model.model.layers:
        layer.self_attn.sbm.conv.source.head.clusters.mul_(1.5)
    check(tokens[:, 18:19], cache, 19)
    static = static_cache(model, 30)
    model(tokens[:, :9], past_key_values=static)
    check(tokens[:, 9:10], static, 10)
    check(tokens[:, 10:12], static, 2)
    static.reset()
    model(tokens[:, 2:12], past_key_values=static)
    check(tokens[:, 12:14], static, 12)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}])
def test_generation_with_kept_memberships_writes_what_it_does_without(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = decoder("llama", "sbm, density"), text(1, 9).repeat(1, 2)
    how = how | {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    out = model.generate(tokens, **how)
    monkeypatch.setattr(KeptKeys, "memberships_before", lambda kept, count: None)
    assert torch.equal(out, model.generate(tokens, **how))


def test_gradients_of_rows_by_scores_are_those_of_the_whole_call() -> None:
    model, tokens = decoder("llama", "top_k, density"), text(2, 12)
    weight = model.model.layers[1].self_attn.q_proj.weight
    expected = torch.autograd.grad(model(tokens).logits[:, -1].sum(), weight)[0]
    cache = model(tokens[:, :-1]).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    close(torch.autograd.grad(model(tokens[:, -1:], past_key_values=cache).logits.sum(), weight)[0], expected)


@pytest.mark.parametrize(
    ("kind", "source"),
    [*(("llama", source) for source in ("window", "top_k, density", "sbm, density", "block_top_k")),
     pytest.param("gemma3_text", "sbm, density", marks=pytest.mark.slow)],
)  # fmt: skip
def test_assisted_generation_writes_what_one_token_at_a_time_does(kind: str, source: str) -> None:
    model, helper, tokens = decoder(kind, source), decoder(kind), text(1, 12).repeat(1, 2)
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens, use_cache=False, **how)
    assert torch.equal(model.generate(tokens, **how), expected)
    assert torch.equal(model.generate(tokens, assistant_model=helper, **how), expected)
    assert torch.equal(model.generate(tokens, prompt_lookup_num_tokens=3, **how), expected)
    assert torch.equal(model.generate(tokens, prefill_chunk_size=5, **how), expected)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **how), expected)


INLINE: list[tuple[str, dict[str, Any]]] = [
    ("bloom", {}), ("mpt", {"attn_config": {"clip_qkv": 1.0}}), ("falcon", {}),
    ("falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), INLINE)
def test_models_that_compute_attention_themselves_are_dense_ones_and_come_back(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Outputs with padding and gradients at density 1; saved, loaded, copied and taken back."""
    model, tokens = decoder(kind, **changes), text(4, 12)
    masks = [None, *(torch.arange(12) < torch.tensor([[12], [7], [5], [1]])).unsqueeze(0)]
    masks.append(masks[1].flip(1))
    before, kept_class = model.config._attn_implementation, {type(x) for x in model.modules()}

    def results(model: Any) -> list[Tensor]:
        logits = [
            model(tokens, attention_mask=None if real is None else real.long(), use_cache=False).logits[
                slice(None) if real is None else real
            ]
            for real in masks
        ]
        loss = sum((x**2).mean() for x in logits)
        weights = {name: x for name, x in model.named_parameters() if ".sbm." not in name}
        return [*logits, *torch.autograd.grad(loss, [*weights.values()])]

    dense = results(model)
    assert all(x.abs().max() > 0 for x in dense)
    names = replace_attention(model, source="top_k", target_density=1.0)
    assert len(names) == 2
    for ours, theirs in zip(results(model), dense, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    replace_attention(model, **SOURCES["window"])
    sparse = results(model)
    assert (sparse[0] - dense[0]).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    for other in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        close(other(tokens).logits, sparse[0])
    loaded_as_dense = type(model).from_pretrained(tmp_path, attn_implementation=before).eval()
    for other in (model, again):
        assert restore_attention(other) == names
        assert {type(x) for x in other.modules()} == kept_class
        assert other.config._attn_implementation == before
    for other in (model, again, loaded_as_dense):
        assert torch.equal(other(tokens).logits, dense[0])


# ------------------------------------------------------------------ packed sequences

LENGTHS = (5, 1, 9, 6)
DRAWN_AND_CHOSEN = ["bigbird", "top_k, density", "sbm", "sbm, density"]


def packed_inputs(form: str) -> dict[str, Any]:
    """Sequences in one row, and one of the forms that tell where they begin."""
    sequences = [{"input_ids": text(1, n, n)[0].tolist()} for n in LENGTHS]
    with_offsets = form != "positions"
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=with_offsets)
    batch: dict[str, Any] = dict(collate(sequences))
    return batch


CASES = [
    (kind, source, ("positions", "offsets")[(m + s) // 2 % 2])
    for m, kind in enumerate(MODELS)
    for s, source in enumerate(DRAWN_AND_CHOSEN)
    if (m + s) % 2 == 0
]


@pytest.mark.parametrize(("kind", "source", "form"), CASES)
def test_packed_sequences_are_those_of_the_padded_batch(kind: str, source: str, form: str) -> None:
    """In evaluation the outputs, and in training the loss and its gradients."""
    model = decoder(kind, source)
    packed = packed_inputs(form)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = torch.zeros_like(real, dtype=torch.long)
    padded[real] = packed["input_ids"][0]
    batch: dict[str, Any] = {"input_ids": padded, "attention_mask": real.long(), "use_cache": False}
    labels = torch.where(real, padded, -100)
    close(model(**packed, use_cache=False).logits[0], model(**batch).logits[real])
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    grads = []
    labels[:, 0] = -100  # as the collator has it
    for inputs in (packed, batch | {"labels": labels}):
        model.zero_grad()
        torch.manual_seed(0)  # of the seeds of graphs, one for each layer
        out = model(**inputs | {"use_cache": False})
        out.loss.backward()
        grads.append([out.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(grads[0]) == len(grads[1]) > 10
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs)


# ------------------------------------------------------------------ learned sinks


def with_sinks(source: dict[str, Any] | None = None) -> Any:
    """A tiny GPT-OSS with eager attention, or with a source."""
    sizes = SIZES | LOCAL | {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.CONFIG_MAPPING["gpt_oss"](**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1 if "sinks" in name else 0.2)
    if source is not None:
        replace_attention(model, **source)
        model.train()(text(2, 20))  # for running means
        model.train()(text(2, 20))
    return model.eval()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pattern", [{"source": "top_k", "target_density": 1.0}, {"source": "full"}, SOURCES["window"]])
def test_learned_sinks_are_those_of_eager_attention(pattern: dict[str, Any], training: bool) -> None:
    """Outputs, weights and all gradients, with padding, of all pairs and of those that a mask over eager ones leaves."""
    eager, sparse = with_sinks().train(training), with_sinks(pattern).train(training)
    tokens, real = text(3, 12), torch.arange(12) < torch.tensor([[12], [7], [10]])
    place = torch.arange(12)
    later = place - place[:, None]  # [L, S]
    pairs = (later <= 0).expand(3, 12, 12) & real[:, None]
    near = pairs & ((later >= -2) | (place < 1)) if "size" in pattern else pairs
    local = pairs & (later > -6)  # the window of LOCAL, whose layer stays dense
    masks = {
        name: torch.where(allowed[:, None], 0.0, torch.finfo(torch.float32).min)
        for name, allowed in (("full_attention", near), ("sliding_attention", local))
    }
    results = []
    for model, mask in ((eager, masks), (sparse, real.long())):
        out = model(tokens, attention_mask=mask, use_cache=False, output_attentions=True)
        (out.logits[real] ** 2).mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and ".sbm." not in name}
        assert all(grad.abs().max() > 0 for name, grad in grads.items() if "sinks" in name)
        results.append((out.logits[real], [x.transpose(1, 2)[real] for x in out.attentions], grads))
    (expected, all_weights, theirs), (logits, weights, ours) = results
    close(logits, expected)
    for x, y in zip(weights, all_weights, strict=True):
        close(x, y)
    assert ours.keys() == theirs.keys()
    for name in ours:
        close(ours[name], theirs[name])


@pytest.mark.parametrize("source", ["window", "top_k", "top_k, density", "indexer", "sbm, density", "full"])
@torch.no_grad()
def test_learned_sinks_with_a_cache(source: str) -> None:
    model, tokens = with_sinks(SOURCES[source]), text(3, 24)
    whole = model(tokens).logits
    for cache in (transformers.DynamicCache(config=model.config), static_cache(model, 30)):
        parts = [model(part, past_key_values=cache).logits for part in tokens.split((9, 1, 4, 10), 1)]
        close(torch.cat(parts, 1), whole)
