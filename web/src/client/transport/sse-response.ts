/**
 * One response over HTTP, where no socket can be opened: POST with `stream`, and GET by number
 * after a cut. Without events of queue and prefill, and without steering.
 */

import { asError, ClientError } from "../errors.ts";
import type { Http } from "./http.ts";
import type { ResponseStream } from "../stream.ts";
import type { ErrorEvent, NumberedEvent } from "../wire/responses.ts";

const DETACH_S = 30; // what a socket's responses have

/** Follow a stream to its end; throws an unreachable ClientError if the connection ends first. */
export async function followOverHttp(http: Http, stream: ResponseStream, signal: AbortSignal): Promise<void> {
  try {
    for await (const event of events(http, stream, signal)) {
      if (event.event === "error" || event.event === "") {
        const { status, error } = JSON.parse(event.data) as ErrorEvent;
        throw ClientError.of(status, error);
      }
      stream.accept(JSON.parse(event.data) as NumberedEvent);
      if (stream.isCancelled && stream.id !== null && !stream.isEnded) cancelOverHttp(http, stream);
      if (stream.isEnded) return;
    }
  } catch (thrown) {
    const error = asError(thrown);
    if (error.isUnreachable) throw error;
    if (error.code === "reader_too_slow") throw new ClientError(error.message, 0, "unreachable");
    const isGone = stream.id !== null && error.status === 404;
    stream.fail(error, isGone ? "gone" : "failed");
    return;
  }
  throw new ClientError("the stream was cut", 0, "unreachable");
}

function events(http: Http, stream: ResponseStream, signal: AbortSignal): ReturnType<Http["events"]> {
  if (stream.id === null) {
    const body = { detach_s: DETACH_S, ...stream.body, stream: true };
    return http.events("v1/responses", { method: "POST", body, signal });
  }
  const after = stream.sequence < 0 ? "" : `&starting_after=${stream.sequence}`;
  return http.events(`v1/responses/${encodeURIComponent(stream.id)}?stream=true${after}`, { signal });
}

const cancelled = new WeakSet<ResponseStream>();

/** Sent once a stream; the end comes as an event. */
export function cancelOverHttp(http: Http, stream: ResponseStream): void {
  if (stream.id === null || cancelled.has(stream)) return;
  cancelled.add(stream);
  http.ask(`v1/responses/${encodeURIComponent(stream.id)}/cancel`, { method: "POST" }).catch(() => cancelled.delete(stream));
}
