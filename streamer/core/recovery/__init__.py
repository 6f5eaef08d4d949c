"""After a failed step: all is computed again, and the request at fault is found."""
