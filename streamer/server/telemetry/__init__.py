"""What the server reports about itself: metrics, records of requests, traces and logs."""
