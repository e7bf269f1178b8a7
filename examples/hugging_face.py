"""Makes a dense model of Hugging Face sparse, saves it and loads it again (`pip install transformers accelerate`).

    python examples/hugging_face.py

A BERT finds which of two marks is in a sequence, with dense attention. Loaded with `attn_implementation="sbm"`, it
trains block models next to its attention, then with their graphs. Expect 100 % before and after, at 21 % of the pairs,
where the target is 20 %.
"""

import argparse
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300, help="steps of dense, and of sparse training (default: 300)")
parser.add_argument("--density", type=float, default=0.2, help="target density of the graphs (default: 0.2)")
parser.add_argument("--output", type=Path, default=Path("runs/hugging_face"), help="folder (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and graphs (default: 0)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from sbm_pyg.integrations.hugging_face import SparsifierCallback  # also registers attn_implementation="sbm"

LENGTH, MARKS, PADDING, FIRST = 32, (2, 3), 0, 1


def make_data(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of half to full length that begin with the same token, and have one of two marks somewhere."""
    examples = []
    for _ in range(count):
        length, label = int(torch.randint(LENGTH // 2, LENGTH + 1, ())), int(torch.randint(2, ()))
        tokens = torch.randint(4, 16, (LENGTH,))
        tokens[0], tokens[int(torch.randint(1, length, ()))] = FIRST, MARKS[label]
        real = torch.arange(LENGTH) < length
        tokens[~real] = PADDING
        examples.append({"input_ids": tokens, "attention_mask": real.long(), "labels": torch.tensor(label)})
    return examples


def train(model: Any, data: list[Any], options: argparse.Namespace, callbacks: list[Any]) -> None:
    """Train a model by Hugging Face's trainer, and save it."""
    name = "sparse" if callbacks else "dense"
    settings = TrainingArguments(
        output_dir=str(options.output / name), max_steps=options.steps, per_device_train_batch_size=32,
        learning_rate=1e-3, lr_scheduler_type="constant", report_to=[], logging_strategy="no", save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=options.seed,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=data, callbacks=callbacks)
    trainer.train()
    trainer.save_model()


@torch.no_grad()
def evaluate(model: Any, data: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Accuracy, and the part of the pairs of real tokens that have a weight."""
    batch = {name: torch.stack([example[name] for example in data]) for name in data[0]}
    torch.manual_seed(0)  # of the graphs
    out = model.eval()(**batch, output_attentions=True)
    real = batch["attention_mask"].bool()
    pairs = (real[:, None, :, None] & real[:, None, None]).expand_as(out.attentions[0])
    weights = torch.stack([layer_weights[pairs] for layer_weights in out.attentions])
    return float((out.logits.argmax(-1) == batch["labels"]).float().mean()), float((weights > 0).float().mean())


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"Expected 'steps' to be at least 1 (got {options.steps}). See --help.")
    callback = SparsifierCallback(options.density)
    torch.manual_seed(options.seed)
    data, tests = make_data(2000), make_data(500)
    sizes: Any = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "pad_token_id": PADDING}
    train(BertForSequenceClassification(BertConfig(**sizes)), data, options, callbacks=[])

    load: Any = BertForSequenceClassification.from_pretrained
    blocks = {"num_clusters": 8}
    model = load(options.output / "dense", attn_implementation="sbm", sbm=blocks)
    print("dense:  accuracy {:.1%}, density {:.1%}".format(*evaluate(model, tests)))
    train(model, data, options, callbacks=[callback])
    print("sparse: accuracy {:.1%}, density {:.1%}".format(*evaluate(model, tests)))
    again = load(options.output / "sparse")  # the config says that attention is sparse, and over which graphs
    print("loaded: accuracy {:.1%}, density {:.1%}".format(*evaluate(again, tests)))


if __name__ == "__main__":
    main()
