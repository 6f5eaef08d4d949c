"""Runners: Plans carried out on a CPU or a GPU, with their inputs, swaps and costs."""
