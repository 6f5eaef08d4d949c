"""instructor: answers of a type, whole and streamed in parts, by a schema and by calls."""

from typing import Literal

import instructor
from bundled import client, server
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    is_sure: bool


asked = {"model": "streamer-demo", "messages": [{"role": "user", "content": "Which color?"}]}
for mode in (None, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    each = client if mode is None else instructor.from_openai(server, mode=mode)
    whole = each.chat.completions.create(response_model=Reply, **asked)
    assert isinstance(whole, Reply)
    *_, last = each.chat.completions.create_partial(response_model=Reply, **asked)
    Reply.model_validate(last.model_dump())
    print("ok", mode, whole)
print("an answer of a type, whole and in parts, by a schema and by calls")
