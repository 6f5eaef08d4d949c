"""How many replicas there should be, by what they have to do: Ray Serve's autoscaling policy.

Ray Serve calls it in its controller with what Replica.record_autoscaling_stats reported, averaged
over its look-back period; bounds, delays and factors are those of its own autoscaling_config.
Imports nothing: the controller gets this module's code, not this package.
"""

from __future__ import annotations

from typing import Any


class ByLoad:
    """Enough replicas for the rows and KV blocks in use, and more while prompts wait.

    queued_tokens  tokens of waiting prompts that one more replica should take
    use            share of the rows, or of the KV blocks, that a replica should have in use
    """

    def __init__(self, queued_tokens: float = 8192, use: float = 0.8) -> None:
        if queued_tokens <= 0 or not 0 < use <= 1:
            raise ValueError("queued_tokens must be above 0, and use above 0 and at most 1")
        self._queued_tokens = queued_tokens
        self._use = use

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Replicas wanted, a fraction where not all of the last one is needed."""
        metrics = context.aggregated_metrics or {}
        rows, kv = metrics.get("row_use", {}), metrics.get("kv_use", {})
        if not rows:
            return context.target_num_replicas, {}
        used = max(sum(rows.values()), sum(kv.values())) / self._use
        queued = sum(metrics.get("queued_tokens", {}).values()) / self._queued_tokens
        if queued < 1:  # a prompt that waits for the next step is no queue
            return used, {}
        return max(used, len(rows) + queued), {}
