/**
 * A WebSocket class whose other end is the test: sent frames are kept, received ones set by the
 * test, and time goes on by `tick` alone (`vi.useFakeTimers` in the test's file).
 */

import { vi } from "vitest";
import { Client, type ClientOptions, type SocketLike } from "../src/client/index.ts";
import type { ClientEvent, Response, ServerEvent } from "../src/client/wire/responses.ts";

export class FakeSocket implements SocketLike {
  static all: FakeSocket[] = [];
  static get last(): FakeSocket {
    const socket = FakeSocket.all.at(-1);
    if (!socket) throw new Error("no socket was opened");
    return socket;
  }
  binaryType = "";
  onmessage: SocketLike["onmessage"] = null;
  onclose: SocketLike["onclose"] = null;
  onerror: SocketLike["onerror"] = null;
  readonly sent: ClientEvent[] = [];
  isClosed = false;
  readonly url: URL;
  readonly protocols: string[];

  constructor(url: URL, protocols: string[]) {
    this.url = url;
    this.protocols = protocols;
    FakeSocket.all.push(this);
  }
  send(data: string | Uint8Array): void {
    this.sent.push(JSON.parse(data as string) as ClientEvent);
  }
  close(): void {
    this.isClosed = true;
  }
  say(event: ServerEvent): void {
    this.onmessage?.({ data: JSON.stringify(event) });
  }
  cut(code = 1006, reason = ""): void {
    this.onclose?.({ code, reason });
  }
  welcome(epoch = "e1", window = 512): void {
    const limits = { lanes: 64, responses: 320, queued: 256, events_per_s: 2000, event_burst: 10_000, sockets: 0, message_bytes: 1 << 20, output_tokens: 1 << 24 };
    this.say({ type: "session.created", session_id: "s", model: "m", context_length: 100, sampling_defaults: { temperature: 0.7, top_p: 0.9 }, epoch, window, detach_s: 30, limits });
  }
  /** Sent events of one type. */
  of(type: ClientEvent["type"]): ClientEvent[] {
    return this.sent.filter((event) => event.type === type);
  }
}

/** A connected client with no wait in its backoff; HTTP returns what `answer` returns. */
export function connected(options: Partial<ClientOptions> = {}): Client {
  FakeSocket.all = [];
  const client = new Client({
    baseUrl: "http://host/root/",
    WebSocket: FakeSocket,
    random: () => -1.5, // no wait
    pingMs: 0,
    fetch: () => Promise.reject(new TypeError("no network")),
    ...options,
  });
  client.connect();
  return client;
}

export function responseOf(id: string, status: Response["status"] = "in_progress", parent: string | null = null): Response {
  return { id, status, previous_response_id: parent, error: null, usage: null } as Response;
}

export const created = (lane: string, id: string, parent: string | null = null): ServerEvent => ({
  type: "response.created",
  sequence_number: 0,
  response: responseOf(id, "in_progress", parent),
  stream_id: lane,
});

export const delta = (lane: string, sequence_number: number, text: string): ServerEvent => ({
  type: "response.output_text.delta",
  sequence_number,
  item_id: "msg",
  delta: text,
  output_index: 0,
  content_index: 0,
  logprobs: [],
  stream_id: lane,
});

export const completed = (lane: string, id: string, sequence_number: number): ServerEvent => ({
  type: "response.completed",
  sequence_number,
  response: responseOf(id, "completed"),
  stream_id: lane,
});

/** Let what is due within so many milliseconds happen. */
export const tick = async (ms = 0): Promise<void> => {
  await vi.advanceTimersByTimeAsync(ms);
};
