/** The client's public names. MessagePack is apart, in msgpack.ts, since it loads a package. */

export { Client, type Ask, type ClientEvents, type ClientOptions } from "./client.ts";
export { json, type Codec } from "./transport/codec.ts";
export type { ConnectionState, Session, SocketClass, SocketLike, TransportName } from "./transport/connection.ts";
export { ClientError } from "./errors.ts";
export { ResponseStream, type Known, type Progress, type StreamEvents, type StreamStatus } from "./stream.ts";
export type { Piece } from "./pieces.ts";
export type * from "./wire/responses.ts";
export type * from "./wire/engine.ts";
