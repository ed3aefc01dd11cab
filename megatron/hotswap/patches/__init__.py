"""Everything that Deadpool changes in upstream: the registry (how) and the table (what and why)."""
