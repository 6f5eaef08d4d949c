"""What an answer's text must match: grammars compiled by llguidance, and masks of tokens."""
