"""Every numeric op that has more than one backend: paged KV, attention, norms, rope, activations.

`ops` is the only door: it fixes signatures, shapes and dtypes, and picks the backend once at
import. `reference` is plain torch, the oracle of every other backend and the one that serves where
there is none. `batch` describes who reads which blocks in one step. Imports torch, and nothing of
streamer's other rooms; called by streamer.model alone.
"""
