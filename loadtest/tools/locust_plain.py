"""A plain locustfile: an HttpUser with Locust's own client, no code of this repository.

`locust -f locust_plain.py --host http://127.0.0.1:8000`
"""

from __future__ import annotations

import json
from typing import Any

from locust import HttpUser, between, task

MESSAGES = [{"role": "user", "content": "What is the KV cache?"}]


class Reader(HttpUser):
    """Requests short answers, plain and streamed."""

    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        """Set the model to the first one that the server lists."""
        models = self.client.get("/v1/models").json()
        self.body: dict[str, Any] = {"model": models["data"][0]["id"], "max_tokens": 48}

    @task(2)
    def whole(self) -> None:
        body = {**self.body, "messages": MESSAGES}
        path = "/v1/chat/completions"
        with self.client.post(path, json=body, catch_response=True) as response:
            if not response.ok or not response.json()["choices"][0]["message"]["content"]:
                response.failure(f"no answer: {response.status_code}")

    @task(2)
    def streamed(self) -> None:
        body = {**self.body, "messages": MESSAGES, "stream": True}
        name = "/v1/chat/completions, streamed"
        with self.client.post(
            "/v1/chat/completions", name=name, json=body, stream=True, catch_response=True
        ) as response:
            lines = [line for line in response.iter_lines() if line.startswith(b"data: ")]
            chunks = [json.loads(line[6:]) for line in lines[:-1]]
            ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
            if not lines or lines[-1] != b"data: [DONE]" or not any(ends):
                response.failure("the stream broke off")

    @task
    def completion(self) -> None:
        body = {**self.body, "prompt": "Once upon a time"}
        self.client.post("/v1/completions", json=body)
