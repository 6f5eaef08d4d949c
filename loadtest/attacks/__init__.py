"""`streamer loadtest attacks`: what clients that mean harm cost their neighbours."""
