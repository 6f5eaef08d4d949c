"""OpenAI's Responses: bodies, events, routes, lanes on sockets, steering."""
