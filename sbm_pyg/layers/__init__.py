"""Attention layers, and the normalizers, score biases and position encodings that they take."""
