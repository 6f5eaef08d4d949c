"""`streamer loadtest attacks`: what hostile clients cost their neighbours."""
