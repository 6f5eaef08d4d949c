/**
 * Lanes: which stream an event is for, and which request to send next.
 *
 * In a lane responses run one after another. An event names its lane, but an error does not name
 * its response, so each lane has at most one unanswered create or resume.
 */

import { ClientError } from "./errors.ts";
import type { ResponseStream } from "./stream.ts";
import type { ClientEvent, ErrorEvent, NumberedEvent, Resumed, ServerEvent, StateEvent } from "./wire/responses.ts";

/**
 * detached: to be requested; asking: no answer yet; attached: its events come on this connection.
 */
type Phase = "detached" | "asking" | "attached";

interface Entry {
  stream: ResponseStream;
  phase: Phase;
  acked: number;
  steers: { resolve: (stream: ResponseStream) => void; reject: (error: ClientError) => void }[];
}

export interface LanesPort {
  /** False: there is no socket. */
  send(event: ClientEvent): boolean;
  /** A stream for a response that the server began: the successor of a steered one. */
  adopt(parent: ResponseStream): ResponseStream;
  /** Tokens between two acks; 0: the application acks. */
  ackEvery(): number;
  failed(error: ClientError): void;
}

export class Lanes {
  readonly #port: LanesPort;
  readonly #lanes = new Map<string, Entry[]>();

  constructor(port: LanesPort) {
    this.#port = port;
  }

  /** Streams that have not ended, lane by lane. */
  get live(): ResponseStream[] {
    return [...this.#lanes.values()].flat().map((entry) => entry.stream).filter((stream) => !stream.isEnded);
  }

  add(stream: ResponseStream): void {
    const lane = this.#lanes.get(stream.lane) ?? [];
    this.#lanes.set(stream.lane, lane);
    lane.push({ stream, phase: "detached", acked: stream.sequence, steers: [] });
  }

  /** The connection is gone: every stream has to be requested again. */
  detach(): void {
    for (const lane of this.#lanes.values()) for (const entry of lane) entry.phase = "detached";
  }

  /** Each lane's first stream, where it is still to be requested. */
  heads(): ResponseStream[] {
    const heads: ResponseStream[] = [];
    for (const [lane] of this.#lanes) {
      const head = this.#sweep(lane)[0];
      if (head?.phase === "detached") heads.push(head.stream);
    }
    return heads;
  }

  /** Send the next create or resume of every lane, where one may be sent. */
  pump(): void {
    for (const lane of [...this.#lanes.keys()]) this.#pumpLane(lane);
  }

  cancel(stream: ResponseStream): void {
    const entry = this.#find(stream);
    if (!entry) return;
    if (entry.phase === "detached" && stream.id === null) {
      stream.setStatus("cancelled");
      this.#pumpLane(stream.lane);
    } else if (stream.id !== null && entry.phase === "attached") {
      this.#port.send({ type: "response.cancel", response_id: stream.id });
    } // else when it is attached
  }

  ack(stream: ResponseStream, sequence: number): void {
    const entry = this.#find(stream);
    if (!entry || stream.id === null || sequence <= entry.acked) return;
    entry.acked = sequence;
    if (entry.phase === "attached") {
      this.#port.send({ type: "response.ack", response_id: stream.id, sequence_number: sequence });
    } else {
      this.#pumpLane(stream.lane); // it was detached for its lag
    }
  }

  steer(stream: ResponseStream, input: string): Promise<ResponseStream> {
    const entry = this.#find(stream);
    if (!entry || stream.id === null || entry.phase !== "attached") {
      return Promise.reject(new ClientError("only a response that streams over a WebSocket can be steered"));
    }
    this.#port.send({ type: "response.steer", previous_response_id: stream.id, input });
    return new Promise((resolve, reject) => entry.steers.push({ resolve, reject }));
  }

  // ---------------------------------------------------------------- events

  accept(event: ServerEvent): void {
    const name = "stream_id" in event ? event.stream_id : undefined;
    if (event.type === "response.steer.failed") {
      this.#steerFailed(event.steer.previous_response_id, event.error.message, event.error.code);
    } else if (name === undefined) {
      if (event.type === "error") this.#port.failed(ClientError.of(event.status, event.error));
    } else {
      this.#dispatch(this.#sweep(name), event);
      this.#pumpLane(name);
    }
  }

  #dispatch(lane: Entry[], event: ServerEvent): void {
    switch (event.type) {
      case "error":
        return this.#refused(lane, event);
      case "response.resumed":
        return this.#resumed(lane, event);
      case "response.waiting":
      case "response.running":
      case "response.prefill":
      case "response.preempted":
      case "response.paused":
        return this.#state(lane, event);
      case "session.created":
      case "session.goaway":
      case "session.pong":
      case "response.steer.accepted":
      case "response.steer.failed":
        return;
      default:
        return this.#numbered(lane, event);
    }
  }

  #state(lane: Entry[], event: StateEvent): void {
    const entry = lane.find((e) => e.stream.id === event.response_id) ?? this.#named(lane, event.response_id);
    entry?.stream.acceptState(event);
  }

  #numbered(lane: Entry[], event: NumberedEvent): void {
    let entry: Entry | undefined;
    if ("response" in event) {
      const { id, previous_response_id } = event.response;
      entry = lane.find((e) => e.stream.id === id);
      entry ??= this.#successor(lane, previous_response_id, id) ?? this.#named(lane, id);
    } else {
      entry = lane.find((e) => e.phase === "attached" && !e.stream.isEnded);
    }
    if (!entry) return;
    entry.stream.accept(event);
    const every = this.#port.ackEvery();
    if (every > 0 && !entry.stream.isEnded && entry.stream.sequence - entry.acked >= every) {
      this.ack(entry.stream, entry.stream.sequence);
    }
  }

  /** The unanswered create gets its id. */
  #named(lane: Entry[], id: string): Entry | undefined {
    const entry = lane.find((e) => e.phase === "asking" && e.stream.id === null);
    if (!entry) return undefined;
    entry.stream.setId(id);
    this.#attached(entry);
    return entry;
  }

  #attached(entry: Entry): void {
    entry.phase = "attached";
    if (entry.stream.isCancelled && entry.stream.id !== null) {
      this.#port.send({ type: "response.cancel", response_id: entry.stream.id });
    }
  }

  #successor(lane: Entry[], parent: string | null, id: string): Entry | undefined {
    const steered = lane.find((e) => parent !== null && e.stream.id === parent && e.steers.length > 0);
    if (!steered) return undefined;
    const stream = this.#port.adopt(steered.stream);
    stream.setId(id);
    const entry: Entry = { stream, phase: "attached", acked: -1, steers: [] };
    lane.splice(lane.indexOf(steered) + 1, 0, entry);
    for (const steer of steered.steers.splice(0)) steer.resolve(stream);
    return entry;
  }

  #steerFailed(parent: string, message: string, code: string): void {
    const entry = [...this.#lanes.values()].flat().find((e) => e.stream.id === parent);
    entry?.steers.shift()?.reject(new ClientError(message, 400, code));
  }

  #resumed(lane: Entry[], event: Resumed): void {
    const entry = lane.find((e) => e.stream.id === event.response_id && e.phase === "asking");
    if (!entry) return;
    if (event.status !== "gone") {
      this.#attached(entry);
    } else if (entry.stream.sequence < 0 && !entry.stream.isForeign) {
      entry.stream.forgetId(); // it waited for its lane when the socket closed: it never began
      entry.phase = "detached";
    } else {
      entry.stream.fail(new ClientError("the server no longer has this response", 404, "gone"), "gone");
    }
  }

  #refused(lane: Entry[], event: ErrorEvent): void {
    const error = ClientError.of(event.status, event.error);
    const asking = lane.find((e) => e.phase === "asking");
    const entry = asking ?? lane.find((e) => !e.stream.isEnded);
    if (!entry) return this.#port.failed(error);
    if (entry === asking || error.code !== "reader_too_slow") entry.stream.fail(error);
    else {
      entry.phase = "detached"; // the response goes on without this reader
      entry.stream.setStatus("paused");
    }
  }

  // ---------------------------------------------------------------- asking

  /** The lane without ended streams, except those whose successor is still to come. */
  #sweep(name: string): Entry[] {
    const lane = this.#lanes.get(name) ?? [];
    for (let i = lane.length - 1; i >= 0; i -= 1) {
      const entry = lane[i];
      if (entry?.stream.isEnded && entry.steers.length === 0) lane.splice(i, 1);
    }
    if (lane.length === 0) this.#lanes.delete(name);
    return lane;
  }

  #pumpLane(name: string): void {
    const lane = this.#sweep(name).filter((entry) => !entry.stream.isEnded);
    for (const [i, entry] of lane.entries()) {
      if (entry.phase === "attached") continue;
      if (entry.phase === "detached" && this.#mayAsk(entry, i) && this.#ask(entry)) entry.phase = "asking";
      return;
    }
  }

  /**
   * A resume only as the lane's first; after a detach for lag, only once the received text was
   * used.
   */
  #mayAsk(entry: Entry, place: number): boolean {
    const { stream } = entry;
    return stream.id === null || (place === 0 && (stream.status !== "paused" || this.#isUsed(entry)));
  }

  #isUsed(entry: Entry): boolean {
    return this.#port.ackEvery() > 0 || entry.acked >= entry.stream.sequence;
  }

  #ask(entry: Entry): boolean {
    const { stream } = entry;
    if (stream.id === null) {
      return this.#port.send({ ...stream.body, type: "response.create", stream_id: stream.lane });
    }
    const resume = { response_id: stream.id, starting_after: stream.sequence, stream_id: stream.lane };
    return this.#port.send({ type: "response.resume", ...resume });
  }

  #find(stream: ResponseStream): Entry | undefined {
    return this.#lanes.get(stream.lane)?.find((entry) => entry.stream === stream);
  }

  /** Over SSE the first of a lane has its own request. */
  setAttached(stream: ResponseStream, isAttached: boolean): void {
    const entry = this.#find(stream);
    if (entry) entry.phase = isAttached ? "attached" : "detached";
  }
}
