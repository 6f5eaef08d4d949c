"""What runs: live requests by status, the lineup of their sequences, and the runner's rows."""
