/** Snapshots of the engine over SSE, until the caller aborts. */

import { backoffMs } from "./transport/backoff.ts";
import { asError, ClientError } from "./errors.ts";
import type { Http } from "./transport/http.ts";
import type { EngineBody } from "./wire/engine.ts";

/** Runs until `signal` is aborted; reconnects after a cut. A refusal is reported and ends it. */
export async function followEngine(
  http: Http,
  onSnapshot: (body: EngineBody) => void,
  onLost: (error: ClientError) => void,
  signal: AbortSignal,
): Promise<void> {
  for (let attempt = 0; !signal.aborted; attempt += 1) {
    let error = new ClientError("the server ended the stream", 0, "unreachable");
    try {
      for await (const { data } of http.events("v1/engine?stream=true", { signal })) {
        const body = JSON.parse(data) as EngineBody;
        if (body.object !== "engine") break; // an error object: the engine died
        attempt = 0;
        onSnapshot(body);
      }
    } catch (thrown) {
      error = asError(thrown);
    }
    if (signal.aborted) return;
    onLost(error);
    if (error.status >= 400 && error.status < 500) return;
    await pause(backoffMs(attempt), signal);
  }
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
