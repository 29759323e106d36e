"""Opt-Out, its baselines and its successors: one ``transformers.Trainer`` that makes a model forget an entity."""
