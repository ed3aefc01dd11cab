"""What a seat's state is: flat optimizer shards, metadata, RNG, and the data cursor; how each is saved and put back."""
