"""Masked language models, pretrained on texts and fine-tuned on tasks of GLUE: ``python -m examples.glue pretrain|finetune|table``."""
