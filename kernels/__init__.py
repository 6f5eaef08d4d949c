"""Every numeric op that has more than one backend: paged KV, attention, norms, rope, activations.

`ops` has the contract, Backend, and chooses a backend for a device; callers receive it as an
argument. `reference` is plain torch: the oracle of the other backends, and the fallback without
them. `batch` describes which rows read which blocks in one step. Imports torch and no other package
of streamer; called by streamer.model alone.
"""
