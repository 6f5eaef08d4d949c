"""Samplers: logits and each row's parameters to token ids, on the host and on a device."""
