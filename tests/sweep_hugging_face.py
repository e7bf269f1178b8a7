"""Every model type of the installed ``transformers``, tiny and random: replaced attention is dense attention, or refused.

In: nothing, or names of model types. Out: a line for each, and the counts. A model is accepted if its outputs with
graph sources at density 1 are those of before, on sequences with padding; refused if ``replace_attention`` raises and
leaves it as it was. A third answer is a fault.

    python -m tests.sweep_hugging_face --output /tmp/sweep.jsonl
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import sbm_pyg.integrations.hugging_face  # noqa: F401, registers "sbm"
from sbm_pyg import replace_attention, restore_attention

TOLERANCE = 1e-4
SECONDS = 120
PARAMETERS = 60_000_000
LENGTH = 12
REAL = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
COUNTS = [  # of attributes of configs by name; the first rule that matches
    (r"(pad|bos|eos|cls|sep|mask|unk|decoder_start|forced\w*)_token_id$", 1),
    (r"(image|video|audio|vision|boi|eoi|img)\w*_(token_id|token_index)$", 3),
    (r"vocab_size", 64),
    (r"^num_(hidden_)?layers$|^(n_layers?|depth)$|_layers$|^layers$|num_hidden_blocks$", 2),
    (r"attn_layer_period", 2), (r"attn_layer_offset", 1), (r"first_k_dense_replace|n_dense_layers", 1),
    (r"(num|n)_\w*experts$|num_experts$", 4),
    (r"experts_per_tok|top_?k_experts|^moe_(top_?)?k$|^top_?k$|num_selected_experts", 2),
    (r"^(n_group|topk_group|num_shared_experts|n_shared_experts)$", 1),
    (r"max_\w*position_embeddings|^n_positions$|max_(source|target)_positions|n_ctx$|max_seq_len", 96),
    (r"^(image_size|input_size|img_size)$", 16), (r"^patch_size$", 4), (r"^num_queries$", 16),
]  # fmt: skip
WIDTHS = re.compile(
    r"hidden_size|intermediate|ffn|d_model|d_ff|d_kv|n_embd|n_inner|embed|_dim$|^dim$|head_size|_rank$|kv_channels|"
    r"d_ssm|d_head|state_size_per_head|projection_size|mrope_section|mlp_hidden|hidden_dim|_dims?$|index_block"
)
SMALL = [  # of attributes of configs that do not keep their ratios; the first rule that matches
    (r"key_value_heads|kv_heads|num_query_groups", 2),
    (r"mamba_n_heads|mamba_num_heads", 4), (r"mamba_(d_head|head_dim)", 16), (r"d_state|n_groups", 4),
    (r"(attention_heads|num_heads|n_heads?|_heads)$|^heads$", 4),
    (r"qk_rope", 4), (r"head_dim$|head_size$|^d_kv$|kv_channels", 8), (r"_rank$", 16),
    (r"intermediate|ffn|^d_ff$|^n_inner$|mlp_dim|mlp_hidden", 48),
    (r"hidden_size|^d_model$|^embed_dim$|^n_embd$|^dim$|^emb_dim$|hidden_dim$|^embedding_size$|_dim$", 32),
]  # fmt: skip


BY_TYPE: dict[str, dict[str, Any]] = {  # sizes that depend on each other
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "zamba2": {
        "hidden_size": 32, "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 4, "num_key_value_heads": 4,
        "num_attention_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"], "vocab_size": 64, "num_hidden_layers": 2, "num_mem_blocks": 1,
    },
    "dots3_note_text": {
        "num_key_value_heads": 4, "layer_types": ["indexed_attention", "full_attention"], "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16, "index_topk": 4,
        "index_n_heads": 2, "index_head_dim": 8, "n_routed_experts": 4, "mlp_layer_types": ["dense"] * 2,
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
}  # fmt: skip


class NotMadeError(Exception):
    """A model that is not made tiny by general rules, or whose inputs are not known here."""


def shrink(config: Any, factor: int | None) -> Any:
    """A copy of a config, and of those in it, of few layers, words and experts, with narrow layers.

    Args:
        config: The config.
        factor: What widths are divided by, so that they keep their ratios. None: they get the same small sizes.
    """
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in ("model_type", "transformers_version", "architectures", "_name_or_path"):
            continue
        inner = vars(config).get(name)
        if isinstance(inner, transformers.PreTrainedConfig):
            value = shrink(inner, factor)
        elif name.endswith(("layer_indices", "layer_ids", "attention_layers_idx")) and isinstance(value, list):
            value = [1]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            rules = COUNTS if factor else [*COUNTS, *SMALL]
            size = next((size for pattern, size in rules if re.search(pattern, name)), None)
            if size is not None:
                value = min(size, value)
            elif factor and WIDTHS.search(name) and value >= 4 * factor:
                value //= factor
        elif factor and WIDTHS.search(name) and isinstance(value, list) and all(isinstance(x, int) for x in value):
            value = [max(1, x // factor) for x in value]
        elif factor and name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = {k: [max(1, n // factor) for n in x] if isinstance(x, list) else x for k, x in value.items()}
        elif name == "per_layer_config":
            value = {}
        values[name] = value
    layers = next((values[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values), 2)
    for name in values:
        listed = values[name]
        if name.endswith(("layer_types", "layers_block_type")) and isinstance(listed, list | tuple) and listed:
            kinds = [*dict.fromkeys(listed)]
            values[name] = [kinds[-1], kinds[0]][:layers]
    if "qk_rope_head_dim" in values:  # of attention with a latent, which has no groups
        values["num_key_value_heads"] = values.get("num_attention_heads")
        if "head_dim" in values:
            values["head_dim"] = values["qk_rope_head_dim"]
    return type(config)(**values)


def configs(kind: str, problems: list[str]) -> Iterator[Any]:
    """Configs to try, the smallest first."""
    if kind in BY_TYPE:
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        small |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
        yield CONFIG_MAPPING[kind](**small | BY_TYPE[kind])
    try:
        default = CONFIG_MAPPING[kind]()
    except Exception as error:
        problems.append(f"config: {error}")
        return
    for factor in (None, 16, 8, 4, 32):
        try:
            yield shrink(default, factor)
        except Exception as error:
            problems.append(f"config: {error}")
    yield default


def class_of(config: Any) -> Any:
    """The class of models of a config: the one without a head, or the first in its module."""
    if type(config) in MODEL_MAPPING:
        listed = MODEL_MAPPING[type(config)]
        return listed[0] if isinstance(listed, list | tuple) else listed
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    classes = [
        x for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, transformers.PreTrainedModel) and x.config_class is type(config)
    ]  # fmt: skip
    runnable = [x for x in classes if "forward" in vars(x)]
    if not runnable:
        raise NotMadeError("no class of models")
    return runnable[0]


def random_weights(model: torch.nn.Module) -> None:
    """Weights that are large enough for attention to matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.numel()):
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.size(1) ** -0.5)
            elif parameter.dim() > 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)


def image_size(config: Any) -> int | tuple[int, int]:
    for part in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        size = getattr(part, "image_size", None) or getattr(part, "img_size", None)
        if size is not None:
            return tuple(size) if isinstance(size, list | tuple) else size
    return 32


def inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs to try: tokens with padding, images, sound, and several of these."""
    torch.manual_seed(1)
    names = inspect.signature(model.forward).parameters
    text, config = {}, model.config
    if "input_ids" in names:
        tokens = torch.randint(5, 60, (2, LENGTH))
        tokens[REAL.diff(dim=1, append=torch.zeros(2, 1, dtype=torch.bool))] = 61  # some models look for the largest
        text = {"input_ids": torch.where(REAL, tokens, 4)}
        if "attention_mask" in names or "kwargs" in names:
            text["attention_mask"] = REAL.long()
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = torch.randint(5, 60, (2, 9))
    size = image_size(config)
    height, width = size if isinstance(size, tuple) else (size, size)
    vision = getattr(config, "vision_config", config)
    image = {"pixel_values": torch.randn(2, getattr(vision, "num_channels", 3) or 3, height, width)}
    bins = next((x for x in (getattr(config, n, None) for n in ("num_mel_bins", "feature_size")) if x), 16)
    sound = {"input_features": torch.randn(2, 40, bins)}
    frames = 2 * getattr(config, "max_source_positions", 48)
    mel = {"input_features": torch.randn(2, bins, frames)}
    wave = {"input_values": torch.randn(2, 4000)}
    spectrum = {"input_values": torch.randn(2, getattr(config, "max_length", 40) or 40, bins)}
    first = getattr(model, "main_input_name", "input_ids")
    first = first if isinstance(first, str) else first[0]
    choices = {"pixel_values": [image], "input_features": [sound, mel], "input_values": [wave, spectrum]}
    for extra in choices.get(first, [{}]):
        if first == "input_ids" and text:
            yield text
        else:
            yield extra | {k: x for k, x in text.items() if k.startswith("decoder")}
            yield extra | text
    if text and "pixel_values" in names:
        yield text | image


@torch.no_grad()
def outputs(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of floats that a model returns, without those of padding."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            at_tokens = "attention_mask" in given and value.shape[:2] == REAL.shape
            tensors[name] = value[REAL] if at_tokens else value
        elif isinstance(value, transformers.utils.ModelOutput):
            for key, each in value.items():
                collect(f"{name}.{key}", each)

    collect("", model(**copy.deepcopy(given)))
    return tensors


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of the same tensor."""
    if ours.keys() != theirs.keys():
        return float("inf")
    pairs = ((ours[name], theirs[name]) for name in ours if theirs[name].numel())
    parts = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs]
    return max(parts, default=0.0) if all(part == part for part in parts) else float("nan")


def make_model(kind: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A tiny model, its inputs, and its outputs."""
    problems: list[str] = []
    for config in configs(kind, problems):
        try:
            model_class = class_of(config)
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
            if count > PARAMETERS:
                problems.append(f"{count / 1e6:.0f} million parameters")
                continue
            model = model_class(config).eval()
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
            continue
        random_weights(model)
        for given in inputs(model):
            try:
                return model, given, outputs(model, given)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
    raise NotMadeError(" / ".join(dict.fromkeys(" ".join(x.split())[:110] for x in problems)))


def check(kind: str) -> tuple[str, str]:
    """One of ``equal``, ``refused``, ``not made``, or a fault; and a remark."""
    try:
        model, given, dense = make_model(kind)
    except NotMadeError as error:
        return "not made", str(error)
    if not dense or not all(bool(x.isfinite().all()) for x in dense.values()):
        return "not made", "its outputs are no finite numbers"
    if distance(outputs(model, given), dense) > 0:
        return "not made", "its outputs are random"
    keys, config = [*model.state_dict()], model.config.to_dict()
    default = model.config._attn_implementation
    try:
        names = replace_attention(model, num_clusters=4)
    except (ValueError, TypeError) as error:
        same = [*model.state_dict()] == keys and model.config.to_dict() == config
        if not same or distance(outputs(model, given), dense) > 0:
            return "fault", f"was refused and changed: {error}"
        return "refused", str(error)
    except Exception as error:
        return "fault", f"replace_attention raised {type(error).__name__}: {error}"
    try:
        apart = distance(outputs(model.eval(), given), dense)
    except Exception as error:
        return "fault", f"its forward pass raised {type(error).__name__}: {str(error)[:300]}"
    if not apart <= TOLERANCE:
        model.set_attn_implementation("eager")
        eager = outputs(model, given)
        model.set_attn_implementation("sbm")
        apart = min(apart, distance(outputs(model, given), eager))
    if not apart <= TOLERANCE and "attention_mask" in given:
        model.set_attn_implementation(default)
        plain = {name: x for name, x in given.items() if name != "attention_mask"}
        dense_plain = outputs(model, plain)
        model.set_attn_implementation("sbm")
        if distance(outputs(model, plain), dense_plain) <= TOLERANCE:
            return "reads padding", "equal without padding; it returns what the model computes at padding"
    if not apart <= TOLERANCE:
        return "fault", f"differs by {apart:.1e} in {names[0]}"
    replace_attention(model, source="window", size=0)
    try:
        reached = distance(outputs(model.eval(), given), dense) > 10 * TOLERANCE
    except ValueError as error:
        reached = "Expected" in str(error)
    restore_attention(model)
    if [*model.state_dict()] != keys or model.config._attn_implementation != default:
        return "fault", "restore_attention left something"
    if distance(outputs(model, given), dense) > 0:
        return "fault", "restore_attention changed the outputs"
    return "equal" if reached else "not reached", f"{len(names)} modules"


class StopError(BaseException):
    """A model type takes too long."""


def stop(*_: Any) -> None:
    raise StopError(f"more than {SECONDS} seconds")


def sweep(output: Path, kinds: list[str]) -> dict[str, tuple[str, str]]:
    """Check the types that the file has no line of, and append a line of each; returns all."""
    lines = output.read_text().splitlines() if output.exists() else []
    results = {line["type"]: (line["result"], line["remark"]) for line in map(json.loads, lines)}
    signal.signal(signal.SIGALRM, stop)
    for kind in kinds:
        if kind in results:
            continue
        signal.alarm(SECONDS)
        try:
            result = check(kind)
        except StopError as error:
            result = ("not made", str(error))
        except Exception as error:
            result = ("fault", f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            signal.alarm(0)
        results[kind] = result
        with output.open("a") as file:
            file.write(
                json.dumps({"type": kind, "result": result[0], "remark": " ".join(result[1].split())[:160]}) + "\n"
            )
        print(f"{kind:32} {result[0]:12} {result[1][:300]}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> dict[str, tuple[str, str]]:
    """The command line; returns the result and the remark of each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all if there are none")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep.jsonl"), help="results (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = sweep(options.output, options.types or sorted(CONFIG_MAPPING.keys()))
    print(dict(Counter(result for result, _ in results.values())))
    return results


if __name__ == "__main__":
    main()
