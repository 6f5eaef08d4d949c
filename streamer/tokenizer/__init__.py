"""Text to token ids and back: a checkpoint's tokenizer, chat template and token-to-bytes table."""
