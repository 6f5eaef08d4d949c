/** How events become frames: JSON here; MessagePack in msgpack.ts, which loads a package. */

import type { ClientEvent, ServerEvent } from "../wire/responses.ts";

export interface Codec {
  /** The subprotocol that is offered. */
  readonly protocol: "streamer.v1.json" | "streamer.v1.msgpack";
  encode(event: ClientEvent): string | Uint8Array<ArrayBuffer>;
  decode(frame: string | ArrayBuffer): ServerEvent;
}

export const json: Codec = {
  protocol: "streamer.v1.json",
  encode: (event) => JSON.stringify(event),
  decode: (frame) => JSON.parse(frame as string) as ServerEvent,
};
