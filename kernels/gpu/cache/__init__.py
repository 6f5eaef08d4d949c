"""What writes the block pool: new keys and values, rotated and quantized, and copies of blocks."""
