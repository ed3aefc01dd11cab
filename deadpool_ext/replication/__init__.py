"""Host arena, copy engine, gate, and the replicator process with its transports. Never imports torch."""
