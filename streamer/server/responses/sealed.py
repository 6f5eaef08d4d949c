"""`encrypted_content` of reasoning: its text as an opaque value that clients keep and send back.

So a response that was not stored has the reasoning of its turn again. The value is authenticated
under the caller's key: it holds through a restart and on every replica, without a secret of the
server's own, and no other key's request accepts it. It is not kept secret from the client, whose
answer has the same text as `content`. Pure.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

from streamer.errors import InvalidRequest

PREFIX: Final = "sr1_"  # of this form of the value
MAC_BYTES: Final = 16


def seal(text: str, tenant: str) -> str:
    """The value for reasoning of a tenant; a third longer than the text's bytes."""
    data = text.encode()
    return PREFIX + urlsafe_b64encode(_mac(data, tenant) + data).decode()


def unseal(value: str, tenant: str, param: str) -> str:
    """The text of a value; InvalidRequest, naming `param`, for a broken one or another key's."""
    try:
        found = b64decode(value.removeprefix(PREFIX), b"-_", validate=True)
        mac, data = found[:MAC_BYTES], found[MAC_BYTES:]
        if value.startswith(PREFIX) and compare_digest(mac, _mac(data, tenant)):
            return data.decode()
    except ValueError:  # no base64, not ASCII, not UTF-8
        pass
    raise InvalidRequest(
        f"{param} could not be verified: it was not made by this server for this key; "
        "leave the item out",
        param=param,
        code="invalid_encrypted_content",
    )


def _mac(data: bytes, tenant: str) -> bytes:
    key = blake2b(tenant.encode(), person=b"reasoning").digest()
    return blake2b(data, key=key, digest_size=MAC_BYTES).digest()
