"""Every numeric op that has more than one backend: paged KV, attention, norms, rope, activations.

`ops` has the contract, Backend, and chooses one for a device; who computes is handed it.
`reference` is plain torch, the oracle of every other backend and the one that serves where
there is none. `batch` describes who reads which blocks in one step. Imports torch, and nothing of
streamer's other rooms; called by streamer.model alone.
"""
