"""Opt-Out and its baselines: entity-level unlearning of causal language models."""
