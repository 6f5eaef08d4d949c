"""Beam search: which hypotheses go on and which have ended, and the sequences that hold them."""
