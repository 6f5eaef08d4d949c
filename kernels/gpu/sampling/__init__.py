"""From logits to tokens: the best, the filters' cut, noise, and the draw itself."""
