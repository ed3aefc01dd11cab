"""Deadpool for Megatron: the only package here that knows the trainer. Nothing happens at import."""
