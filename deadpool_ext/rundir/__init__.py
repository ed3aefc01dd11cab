"""What a run leaves behind: reading and judging run directories."""
