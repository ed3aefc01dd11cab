"""How slots travel between nodes."""
