/** HTTP requests, with the key; every refusal is a ClientError. */

import { asError, ClientError } from "../errors.ts";
import { readSse, type SseEvent } from "./sse.ts";
import type { ApiError } from "../wire/responses.ts";
import type { ModelList, TicketAnswer } from "../wire/engine.ts";

export type Fetch = (input: URL, init?: RequestInit) => Promise<Response>;

export class Http {
  readonly base: URL;
  key = "";
  readonly #fetch: Fetch;

  constructor(base: URL, fetch: Fetch) {
    this.base = base;
    this.#fetch = fetch;
  }

  /** The response; else a ClientError with the server's message, or code "unreachable". */
  async ask(path: string, init: { method?: string; body?: unknown; signal?: AbortSignal } = {}): Promise<Response> {
    if (/[^ -\xff]/.test(this.key)) throw new ClientError("the key has characters that an HTTP header cannot carry", 401, "invalid_api_key");
    const headers: Record<string, string> = {};
    if (this.key) headers["authorization"] = `Bearer ${this.key}`;
    if (init.body !== undefined) headers["content-type"] = "application/json";
    const request: RequestInit = { method: init.method ?? "GET", headers };
    if (init.body !== undefined) request.body = JSON.stringify(init.body);
    if (init.signal) request.signal = init.signal;
    let response: Response;
    try {
      response = await this.#fetch(new URL(path, this.base), request);
    } catch (thrown) {
      throw new ClientError(asError(thrown).message, 0, "unreachable");
    }
    if (response.ok) return response;
    throw await refusal(response);
  }

  async json<T>(path: string, init: { method?: string; body?: unknown; signal?: AbortSignal } = {}): Promise<T> {
    return (await (await this.ask(path, init)).json()) as T;
  }

  /** Events of a body; a cut connection ends them without an error. */
  async *events(
    path: string,
    init: { method?: string; body?: unknown; signal?: AbortSignal } = {},
  ): AsyncGenerator<SseEvent> {
    const response = await this.ask(path, init);
    if (!response.body) return;
    try {
      yield* readSse(response.body);
    } catch {
      // cut: the caller knows from the events whether that was the end
    }
  }

  /** A ticket, which opens one socket for this key within half a minute. */
  ticket(signal: AbortSignal): Promise<TicketAnswer> {
    return this.json("v1/tickets", { method: "POST", body: {}, signal });
  }

  models(signal: AbortSignal): Promise<ModelList> {
    return this.json("v1/models", { signal });
  }
}

async function refusal(response: Response): Promise<ClientError> {
  try {
    const { error } = (await response.json()) as { error: ApiError };
    return ClientError.of(response.status, error);
  } catch {
    return new ClientError(`${response.status} ${response.statusText}`.trim(), response.status);
  }
}
