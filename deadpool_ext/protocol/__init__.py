"""Pure state machines and data types of the hot-swap protocol: no clock, no I/O, no threads, standard library only."""
