"""Deadpool's runtime: protocol, control plane, replication and communicator repair, independent of Megatron."""

__version__ = "0.1.0"
