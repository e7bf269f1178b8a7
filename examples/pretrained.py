"""Makes the attention of a trained language model sparse, without its training data, and compares sources.

    python examples/pretrained.py FOLDER --train text.txt --test other.txt
    python examples/pretrained.py FOLDER --train text.txt --test other.txt --arms candidates --save sparse

FOLDER holds a decoder of `transformers` and its tokenizer, such as SmolLM2-135M (`pip install transformers`). Sources
that learn are calibrated on the first text, in some minutes, and all are evaluated on the second one. `frozen` and
`frozen candidates` are the controls: the same block models without calibration. Expect losses of SmolLM2 on WikiText-2
as in docs/guides/pretrained.md.
"""

import argparse
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
LINEAR = {"source": "sbm", "parameterization": "linear"}
ARMS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"source": "window"},
    "top-k": {"source": "top_k"},
    "indexer": {"source": "indexer"},
    "block model": LINEAR,
    "candidates": LINEAR | {"candidates": 4},
    "frozen": LINEAR,
    "frozen candidates": LINEAR | {"candidates": 4},
}
parser.add_argument("folder", type=Path, help="folder of a decoder of transformers and its tokenizer")
parser.add_argument("--train", type=Path, required=True, help="text file to calibrate on")
parser.add_argument("--test", type=Path, required=True, help="text file to evaluate on")
parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="what to compare (default: all)")
parser.add_argument("--density", type=float, default=0.05, help="target density (default: %(default)s)")
parser.add_argument("--window", type=int, default=16, help="each token also attends to so many before it (default: 16)")
parser.add_argument("--sinks", type=int, default=4, help="and to so many first tokens (default: %(default)s)")
parser.add_argument("--length", type=int, default=2048, help="tokens of a text to evaluate on (default: %(default)s)")
parser.add_argument("--texts", type=int, default=4, help="texts to evaluate on (default: %(default)s)")
parser.add_argument("--batches", type=int, default=5, help="texts to calibrate on, as long (default: 5)")
parser.add_argument("--steps", type=int, default=200, help="steps of each source (default: %(default)s)")
parser.add_argument("--save", type=Path, help="folder for the last model")
parser.add_argument("--seed", type=int, default=0, help="seed of sources and calibration (default: %(default)s)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sbm_pyg import calibrate, replace_attention
from sbm_pyg.analysis import compare_heads


def read_texts(tokenizer: Any, path: Path, count: int, length: int) -> list[torch.Tensor]:
    """Equally long parts of a file, ``[1, length]`` each, at equal distances."""
    tokens = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    count = min(count, len(tokens) // length)
    if count == 0:
        parser.error(f"Expected '{path}' to have {length:,} tokens (got {len(tokens):,}). Take a longer text.")
    return [tokens[None, at : at + length] for at in range(0, len(tokens) - length + 1, len(tokens) // count)][:count]


@torch.no_grad()
def evaluate(model: Any, texts: list[torch.Tensor]) -> tuple[float, float]:
    """Mean loss of the next token, and seconds of a text."""
    start = time.perf_counter()
    losses = [float(model(input_ids=text, labels=text, use_cache=False).loss) for text in texts]
    return sum(losses) / len(losses), (time.perf_counter() - start) / len(texts)


def make_sparse(model: Any, arm: str, texts: list[torch.Tensor], options: argparse.Namespace) -> float:
    """Give a model the sources of an arm; return the seconds that calibration took."""
    near = {"window": options.window, "num_sinks": options.sinks}
    if arm == "window":  # as many keys as the others have
        size = round(options.density * options.length / 2) + options.window
        replace_attention(model, source="window", size=size, num_sinks=options.sinks)
        return 0.0
    torch.manual_seed(options.seed)
    learns = arm in ("indexer", "block model", "candidates")
    replace_attention(model, **ARMS[arm], **near, target_density=1.0 if learns else options.density)
    if not learns:
        return 0.0
    start = time.perf_counter()
    batches = [{"input_ids": text, "use_cache": False, "logits_to_keep": 1} for text in texts]
    calibrate(model, batches, density=options.density, steps=options.steps, seed=options.seed)
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each arm."""
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    train = read_texts(tokenizer, options.train, options.batches, options.length)
    test = read_texts(tokenizer, options.test, options.texts, options.length)
    print(f"{'arm':<18}{'loss':>8}{'density':>9}{'kept':>7}{'s a text':>10}{'calibration':>13}", flush=True)
    for arm in options.arms:
        seconds = 0.0 if arm == "full" else make_sparse(model, arm, train, options)
        loss, seconds_of_text = evaluate(model, test)
        density = kept = 1.0
        if arm != "full":
            with compare_heads(model) as table, torch.no_grad():
                model(input_ids=test[0], use_cache=False, logits_to_keep=1)
            density, kept = (
                sum(getattr(head, name) for head in table.heads) / len(table.heads) for name in ("density", "kept")
            )
        print(
            f"{arm:<18}{loss:8.3f}{100 * density:7.1f} %{kept:7.3f}{seconds_of_text:10.1f}{seconds:11.0f} s", flush=True
        )
    if options.save is not None:
        model.save_pretrained(options.save)
        tokenizer.save_pretrained(options.save)


if __name__ == "__main__":
    main()
