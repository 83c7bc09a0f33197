"""The model, its sharding, its weights and its tokenizer."""
