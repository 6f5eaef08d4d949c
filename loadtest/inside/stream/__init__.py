"""`streamer bench stream`: server and client of the streaming layer's benchmark."""
