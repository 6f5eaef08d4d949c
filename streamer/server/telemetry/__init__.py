"""What the server says of itself: metrics, records of requests, traces and logs."""
