"""GPT on upstream's trainer: batches, loss, data sets, and the call of upstream's ``pretrain``."""
