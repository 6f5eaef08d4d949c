"""OpenAI's Responses, in one place: bodies, events, routes, lanes on sockets, steering."""
