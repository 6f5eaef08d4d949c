"""The texts that the bundled model learns from, and the generators that vary them."""
