"""instructor: answers of a type, whole, streamed in parts, and several."""

from typing import Literal

from bundled import client
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    is_sure: bool


asked = {"model": "streamer-demo", "messages": [{"role": "user", "content": "Which color?"}]}
whole = client.chat.completions.create(response_model=Reply, **asked)
assert isinstance(whole, Reply)
*_, last = client.chat.completions.create_partial(response_model=Reply, **asked)
Reply.model_validate(last.model_dump())
print("an answer of a type, whole and in parts:", whole)
