"""Control plane: the asyncio shell around the pure protocol (coordinator server, node agent, worker session)."""
