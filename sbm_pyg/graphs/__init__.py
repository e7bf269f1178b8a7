"""Graphs of ragged batches of tokens: offsets of sequences, compressed rows, graphs over tokens and over blocks."""
