"""The open loop: requests when they are due, sweeps of the rate, and their reports."""
