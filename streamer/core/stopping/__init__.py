"""What ends an answer: stop strings, matched on the bytes of its tokens."""
